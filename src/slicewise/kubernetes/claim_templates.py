"""The claim templates of unmodified pods, which slicewise creates in the namespaces of these pods.

An admission policy (`deploy/kubernetes/unmodified-pods`) turns resources such as
``nvidia.com/mig-1g.10gb: 1`` into references to templates. Their names say what is in them, so one
template serves all pods of a namespace that ask for the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import Pod
from slicewise.kubernetes.backoff import ObjectBackoff
from slicewise.kubernetes.claim_parameters import API_VERSION, DRIVER, KIND
from slicewise.kubernetes.fencing import InBackground
from slicewise.kubernetes.pending_claims import PendingClaims

CLASS = "mig.slicewise.dev"

_PROFILE = re.compile("slicewise-mig-([0-9]{1,3}g[.][0-9]{1,4}gb)((?:[.-][a-z]{1,8}){0,4})-x(.+)")
_NEED = re.compile("slicewise-need-([0-9]{1,4})c-([0-9]{1,7})gb")
_COUNT = re.compile("[1-9]|[12][0-9]|3[0-2]")
_NAMED = 3
"""The number of templates that a summary names."""

log = logging.getLogger("slicewise.kubernetes")


def template_parameters(name: str) -> tuple[dict[str, Any], int] | None:
    """What the template of this name asks for, and how many; None for any other template."""
    if found := _PROFILE.fullmatch(name):
        profile, more, count = found.groups()
        # Names of resources have no "+": 1g.10gb.me is the profile 1g.10gb+me.
        more = f"+{more[1:]}" if more.startswith(".") else more
        return ({"profile": profile + more}, int(count)) if _COUNT.fullmatch(count) else None
    if (found := _NEED.fullmatch(name)) and any(map(int, found.groups())):
        compute, memory = map(int, found.groups())
        return {"compute": compute, "memoryGB": memory}, 1
    return None


def template(namespace: str, name: str) -> dict[str, Any]:
    """The template of this name, which is one of slicewise's."""
    asked = template_parameters(name)
    assert asked is not None
    parameters, count = asked
    opaque = {
        "driver": DRIVER,
        "parameters": {"apiVersion": API_VERSION, "kind": KIND, **parameters},
    }
    request = {"name": "slices", "exactly": {"deviceClassName": CLASS, "count": count}}
    labels = {"app.kubernetes.io/managed-by": "slicewise"}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"spec": {"devices": {"requests": [request], "config": [{"opaque": opaque}]}}},
    }


def missing_templates(pod: Pod) -> Iterator[str]:
    """The templates of slicewise from which a pod still needs a claim."""
    made = {one.name for one in pod.status.resource_claim_statuses}
    for one in pod.spec.resource_claims:
        name = one.resource_claim_template_name
        if name is not None and one.name not in made and template_parameters(name) is not None:
            yield name


class ClaimTemplates:
    """Creates the templates that pods refer to, and creates them again if they were deleted."""

    def __init__(
        self,
        pending: PendingClaims,
        create: Callable[[dict[str, Any]], None],
        in_background: InBackground,
        tell: Callable[[Pod, str], None],
        clock: Callable[[], float],
    ) -> None:
        """``create`` creates a template unless it exists; ``tell`` tells a pod why it cannot."""
        self._pending = pending
        self._create = create
        self._in_background = in_background
        self._tell = tell
        self._backoff = ObjectBackoff(clock)
        """Of templates that were created, or that the API refused."""
        self._waiting: dict[tuple[str, str], dict[str, None]] = {}
        """By namespace and template: the pods that had no claim from it."""
        self._running: set[tuple[str, str]] = set()
        self._why: dict[tuple[str, str], str] = {}
        """The templates that could not be created, and what the API said."""

    def pod_changed(self, pod: Pod) -> None:
        """Create the missing templates of a pod."""
        for name in missing_templates(pod):
            key = pod.metadata.namespace, name
            self._waiting.setdefault(key, {})[pod.metadata.key] = None
            if key in self._why:
                self._tell(pod, self._why[key])
            if key not in self._running and not self._backoff.holds("/".join(key)):
                self._start(key)

    def _start(self, key: tuple[str, str]) -> None:
        self._running.add(key)
        self._in_background(partial(self._create, template(*key)), partial(self._done, key))

    def _done(self, key: tuple[str, str], _: object, error: SlicewiseError | None) -> None:
        self._running.discard(key)
        self._backoff.add("/".join(key))
        if error is None:
            self._why.pop(key, None)
            return
        text = f"the claim template {key[1]} cannot be created: {error}"
        if self._why.get(key) != text:
            log.warning("namespace %s: %s", key[0], text)
        self._why[key] = text
        for pod in self._lacking(key):
            self._tell(pod, text)

    def _lacking(self, key: tuple[str, str]) -> list[Pod]:
        """The pods that still have no claim from a template; the others are forgotten."""
        pods = (self._pending.pods.get(one) for one in self._waiting.get(key, ()))
        lacking = [pod for pod in pods if pod and key[1] in missing_templates(pod)]
        self._waiting[key] = {pod.metadata.key: None for pod in lacking}
        return lacking

    def retry(self) -> None:
        """Create templates again from which pods still have no claim."""
        for uid in self._backoff.take_due():
            namespace, _, name = uid.partition("/")
            if self._lacking((namespace, name)):
                self._start((namespace, name))
            else:
                self._backoff.forget(uid)
                self._why.pop((namespace, name), None)
                self._waiting.pop((namespace, name), None)

    def clear(self) -> None:
        """Forget everything: another replica leads now."""
        for key in self._waiting:
            self._backoff.forget("/".join(key))
        self._waiting.clear()
        self._why.clear()

    @property
    def next_time(self) -> float | None:
        """When the next template is looked at again."""
        return self._backoff.next_time

    def summary(self) -> str:
        """The templates that cannot be created, for an operator; empty if there are none."""
        if not self._why:
            return ""
        named = "; ".join(f"{key[0]}: {why}" for key, why in list(self._why.items())[:_NAMED])
        more = f"; and {len(self._why) - _NAMED} more" if len(self._why) > _NAMED else ""
        return f"unmodified pods wait for their claims: {named}{more}"
