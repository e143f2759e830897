"""Pods, as far as the service has to do with them, and what it needs of their API.

The service places the instances that a pod asks for; whoever talks to the Kubernetes API is handed
in from outside, like a store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from slicewise.core.errors import SlicewiseError

_ENDED = ("Succeeded", "Failed")


class _Object(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """Part of a Kubernetes object: fields that nobody here knows are skipped."""


class PodMeta(_Object, frozen=True):
    """Which pod it is."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class Resources(_Object, frozen=True):
    """What a container asks for, by resource."""

    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class Container(_Object, frozen=True):
    """A container of a pod."""

    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None
    """Always makes an init container a sidecar, which stays while the others run."""


class PodSpec(_Object, frozen=True):
    """What a pod consists of, and the node it is bound to."""

    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    node_name: str | None = None


class PodStatus(_Object, frozen=True):
    """How a pod fares."""

    phase: str | None = None


class Pod(_Object, frozen=True):
    """A pod."""

    metadata: PodMeta = PodMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def uid(self) -> str:
        """What no other pod has, not even a later one of the same name."""
        return self.metadata.uid

    @property
    def node(self) -> str:
        """The node it is bound to, or nothing."""
        return self.spec.node_name or ""

    @property
    def over(self) -> bool:
        """Whether its containers have ended for good."""
        return self.status.phase in _ENDED

    def __str__(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class PodsError(SlicewiseError):
    """The API did not do what it was asked for, or nobody knows whether it did."""


@dataclass(frozen=True, slots=True)
class EveryPod:
    """All pods that there are, by UID."""

    pods: Mapping[str, Pod]


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod is new, or different."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class PodGone:
    """A pod is not there any more."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class PodsUnknown:
    """The API cannot be followed, and why; or it can again, and the text is empty."""

    why: str


PodNews = EveryPod | PodSeen | PodGone | PodsUnknown


class Pods(Protocol):
    """The pods of a cluster; all methods but ``follow`` may raise PodsError, from any thread."""

    def get(self, namespace: str, name: str) -> Pod | None:
        """The pod of that name as it is now, if there is one."""

    def bind(self, pod: Pod, node: str, annotations: Mapping[str, str]) -> None:
        """Bind a pod to a node and annotate it, in one step; only if it is as given."""

    def touch(self, pod: Pod, annotation: str, value: str) -> Pod | None:
        """Annotate a pod and return it as it is then; None if it is gone.

        A binding on its way that was meant for the pod as it was before is refused from then on.
        """

    def follow(self, tell: Callable[[PodNews], None]) -> Callable[[], None]:
        """Have every pod told, then whatever changes, from other threads; returns how to stop."""
