"""Pods for the scheduler extender, and the protocol of their API.

The service places the instances that a pod requests; `slicewise.kubernetes` implements the
protocol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from slicewise.core.errors import SlicewiseError

EXPECTED = "slicewise.dev/expected-seconds"
"""The annotation of a pod: how long it is expected to run."""

_ENDED = ("Succeeded", "Failed")
_DECIMAL = re.compile("[0-9]{1,9}([.][0-9]{1,9})?")
_SHOWN = 40
_LONGEST = 10 * 365 * 86400


def read_expected(annotations: Mapping[str, str]) -> tuple[float | None, str]:
    """How many seconds a pod is expected to run, if it says so; and what is wrong with that."""
    text = annotations.get(EXPECTED)
    if text is None:
        return None, ""
    if _DECIMAL.fullmatch(text) and float(text):
        return float(text), ""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return None, f"annotation {EXPECTED}: {shown!r} is not a positive number: it is ignored"


class _Object(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """Part of a Kubernetes object; unknown fields are ignored."""


class PodMeta(_Object, frozen=True):
    """The metadata of a pod."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] | None = None


class Resources(_Object, frozen=True):
    """The resources of a container, by name."""

    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class Container(_Object, frozen=True):
    """A container of a pod."""

    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None
    """`Always` makes an init container a sidecar, which runs beside the other containers."""


class PodSpec(_Object, frozen=True):
    """The containers of a pod, and the node it is bound to."""

    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    node_name: str | None = None
    active_deadline_seconds: int | None = None


class PodStatus(_Object, frozen=True):
    """The status of a pod."""

    phase: str | None = None


class Pod(_Object, frozen=True):
    """A pod."""

    metadata: PodMeta = PodMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def uid(self) -> str:
        """The unique id; a later pod of the same name has another one."""
        return self.metadata.uid

    @property
    def node(self) -> str:
        """The node it is bound to; empty if none."""
        return self.spec.node_name or ""

    @property
    def over(self) -> bool:
        """Whether its containers have terminated for good."""
        return self.status.phase in _ENDED

    @property
    def expected_seconds(self) -> float | None:
        """How long it keeps its instances, as far as it says so."""
        hint, _ = read_expected(self.metadata.annotations or {})
        known = (hint, self.spec.active_deadline_seconds)
        return min(
            (float(min(s, _LONGEST)) for s in known if s is not None and s > 0), default=None
        )

    def __str__(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class PodsError(SlicewiseError):
    """Raised when the API refused a call, or its outcome is unknown."""


@dataclass(frozen=True, slots=True)
class EveryPod:
    """The complete list of pods, by UID."""

    pods: Mapping[str, Pod]


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod was added or changed."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class PodGone:
    """A pod was deleted."""

    pod: Pod


@dataclass(frozen=True, slots=True)
class PodsUnknown:
    """The watch failed, with the reason; empty once it works again."""

    why: str


PodNews = EveryPod | PodSeen | PodGone | PodsUnknown


class Pods(Protocol):
    """The pods of a cluster. Thread-safe; all methods but ``follow`` may raise PodsError."""

    def get(self, namespace: str, name: str) -> Pod | None:
        """Return the current version of a pod, if it exists."""

    def bind(self, pod: Pod, node: str, annotations: Mapping[str, str]) -> None:
        """Bind a pod to a node and annotate it atomically, unless it has changed since."""

    def touch(self, pod: Pod, annotation: str, value: str) -> Pod | None:
        """Annotate a pod and return its new version; None if it is gone.

        The API refuses bindings in flight that were made for the old version.
        """

    def follow(self, tell: Callable[[PodNews], None]) -> Callable[[], None]:
        """Report all pods, then changes, to ``tell`` on other threads; return a stop function."""
