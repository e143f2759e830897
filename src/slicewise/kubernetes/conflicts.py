"""Conflicts: claims of other classes to which kube-scheduler may be allocating our devices.

No lock spans two claims. But kube-scheduler sees changes of claims in order: if it decides without
having seen an allocation of ours, the claim it decides for is older than that allocation. When our
watch has delivered our own write, all such claims, the rivals, are known. Without rivals, no
conflict is possible. Otherwise our pod is held back until each rival has its devices or is deleted.

Some rivals wait long. When kube-scheduler reserves our claim for the pod, it has seen the
allocation. From then on it only writes what it had decided before, so the rivals get a limited
time; a decision in progress shows as a nominated node of the rival's pod, or as a finalizer.

This module only judges; `AllocationWriter.confirm_settled` confirms claims or revokes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from slicewise.kubernetes.api import DeviceClass, ResourceClaim
from slicewise.kubernetes.claim_states import ClaimRecords, Settling
from slicewise.kubernetes.pending_claims import single_node

EXPECTED_SECONDS = 600.0
"""How long more rivals for a node are expected after one was seen."""

LONGEST = 60.0
"""The additional time while an allocation is being written for a rival."""

_KNOWN_SECONDS = 1.0
"""How long it is not looked up again whether rivals compete for a node."""

When = Literal["auto", "always", "never"]

_DRIVER = re.compile(r"""device\.driver\s*==\s*["']([^"']+)["']""")
_UNCLEAR = re.compile(r"\|\||!|\?")
"""Operators with which an expression may select devices of other drivers than those it names."""


@dataclass(slots=True)
class Conflicts:
    """The rivals, and our tentative claims that wait for them."""

    settle: float
    """The seconds that rivals get after our claim was reserved."""
    when: When = "auto"
    """When allocations are tentative; auto: while rivals for the same node are expected."""
    rivals: dict[str, ResourceClaim] = field(default_factory=dict)
    """By uid: claims without devices that may get some of ours at any moment."""
    records: ClaimRecords = field(default_factory=ClaimRecords)
    """The records of the cache."""
    begun: set[str] = field(default_factory=set)
    """Rivals with a finalizer, or whose pod has devices for another claim."""
    nominated: set[str] = field(default_factory=set)
    """Rivals whose pod has a nominated node: their devices are being written."""
    may_run: Callable[[ResourceClaim, str], bool] = lambda claim, node: True
    """Whether a pod with a claim might run on a node."""
    _lately: dict[str, float] = field(default_factory=dict)
    """By node: when a claim of another class last got devices there, or competed for them."""
    _competing: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """By node: whether a rival competes for it, and until when that is not looked up again."""

    @property
    def tentative(self) -> dict[str, Settling]:
        """By uid: what each of our tentative claims waits for."""
        return self.records.tentative

    def update(self, claim: ResourceClaim, rival: bool, now: float) -> None:
        """Add or update a claim of another class; ``rival``: it may get devices of ours."""
        uid, allocation = claim.metadata.uid, claim.status.allocation
        self._competing.clear()
        if rival and allocation is not None:
            node = single_node(allocation.node_selector)
            for name in (node,) if node else {one.pool for one in allocation.devices.results}:
                self._lately[name] = now
        if rival and allocation is None and not claim.metadata.deletion_timestamp:
            self.rivals[uid] = claim
            return
        self.drop(uid)

    def drop(self, uid: str) -> None:
        """Remove a claim that cannot conflict any more."""
        self._competing.clear()
        self.rivals.pop(uid, None)
        self.nominated.discard(uid)
        self.begun.discard(uid)
        for one in self.tentative.values():
            if one.rivals is not None:
                one.rivals.discard(uid)

    def expected(self, now: float, node: str) -> bool:
        """Whether an allocation on a node that is written now has to be tentative."""
        if self.when != "auto":
            return self.when == "always"
        last = self._lately.get(node, float("-inf"))
        return self.competes(now, node) or now < last + EXPECTED_SECONDS

    def competes(self, now: float, node: str) -> bool:
        """Whether a rival may get devices on a node."""
        until, found = self._competing.get(node, (float("-inf"), False))
        if now >= until:
            found = any(self.may_run(claim, node) for claim in self.rivals.values())
            self._competing[node] = now + _KNOWN_SECONDS, found
        if found:
            self._lately[node] = now
        return found

    def reserved(self, uid: str, now: float) -> None:
        """Note that kube-scheduler has reserved a claim of ours: it has seen the allocation."""
        one = self.tentative.get(uid)
        if one is not None and one.until is None:
            one.until = now + self.settle

    def seen(self, uid: str) -> None:
        """Note that the watch has delivered our write: all rivals of the claim are known."""
        one = self.tentative.get(uid)
        if one is not None and one.rivals is None:
            allocation = self.records[uid].claim.status.allocation
            node = None if allocation is None else single_node(allocation.node_selector)
            one.rivals = {
                other
                for other, claim in self.rivals.items()
                if node is None or self.may_run(claim, node)
            }

    def settled(self, now: float) -> list[str]:
        """The tentative claims that no other claim can conflict with any more."""
        return [
            uid
            for uid, one in self.tentative.items()
            if one.rivals is not None
            and (not one.rivals or (one.until is not None and now >= self._due(one, one.until)))
        ]

    @property
    def next_time(self) -> float | None:
        """When the time of the next claim's rivals ends."""
        times = [
            self._due(one, one.until) for one in self.tentative.values() if one.until is not None
        ]
        return min(times, default=None)

    def _due(self, one: Settling, until: float) -> float:
        """When a claim may be confirmed although some of its rivals still have no devices.

        The limit is later while kube-scheduler seems to write for a rival. It exists because a
        finalizer also stays on a claim that was deallocated.
        """
        rivals = one.rivals or set()
        writing = not (self.nominated.isdisjoint(rivals) and self.begun.isdisjoint(rivals))
        return until + LONGEST if writing else until


def may_want(claim: ResourceClaim, classes: Mapping[str, DeviceClass], drivers: set[str]) -> bool:
    """Whether a claim of another class could get devices of these drivers."""
    for request in claim.spec.devices.requests:
        if request.exactly is None:
            return True  # alternatives: it may be anything
        device_class = classes.get(request.exactly.device_class_name)
        if device_class is None:
            continue
        named = [
            name
            for selector in device_class.spec.selectors
            if selector.cel is not None and not _UNCLEAR.search(selector.cel.expression)
            for name in _DRIVER.findall(selector.cel.expression)
        ]
        if not named or not drivers.isdisjoint(named):
            return True
    return False
