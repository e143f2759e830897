"""Rivals: claims of other classes that the stock scheduler may be giving devices to right now.

No lock spans claims. But the scheduler learns of claims in the order in which they change, so when
it decides without knowing an allocation of ours, the claim it decides for is older than ours. Once
our own write has come back to us, all such claims are known. Where there are none, nothing can
collide. Where there are some, a pod of ours is held back until each of them has got its devices or
is gone. Some wait for long. So from the moment on at which the scheduler has put our pod down on
the claim, and thereby shown that it knows of it, they are given some time: what it had decided
before is then being written, which shows in a node that the rival's pod is nominated for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slicewise.k8s.api import DeviceClass, ResourceClaim

LATELY = 600.0
"""For so many seconds after a rival was seen, and after the start, others are expected."""

LONGEST = 60.0
"""How much longer an allocation is held back while something is being written for a rival."""

When = Literal["auto", "always", "never"]

_DRIVER = re.compile(r"""device\.driver\s*==\s*["']([^"']+)["']""")


@dataclass(slots=True)
class Tentative:
    """An allocation of ours that is not confirmed yet."""

    claim: str
    until: float | None = None
    """When those who might collide have had time enough, once the scheduler knows of it."""
    rivals: set[str] | None = None
    """Who might still collide; None until our write has come back."""


@dataclass(slots=True)
class Rivals:
    """The claims of others without devices, and our allocations that wait for them."""

    settle: float
    """How many seconds a rival is given to show what it got."""
    when: When = "auto"
    """When allocations are tentative: while rivals are to be expected, always, or never."""
    waiting: dict[str, ResourceClaim] = field(default_factory=dict)
    """By uid: claims of others that may get devices at any moment."""
    tentative: dict[str, Tentative] = field(default_factory=dict)
    """By uid: our claims."""
    begun: set[str] = field(default_factory=set)
    """Those of which something is written already: a finalizer, or devices of another claim."""
    nominated: set[str] = field(default_factory=set)
    """Those whose pod has a node, so that their devices are being written."""
    last_seen: float = float("-inf")
    """When a rival was seen last, or might have been, since nobody looked."""

    def note(self, claim: ResourceClaim, rival: bool, now: float) -> None:
        """A claim of others is like this now; ``rival`` if it may want our devices."""
        uid = claim.metadata.uid
        if rival:
            self.last_seen = now
        if rival and claim.status.allocation is None and not claim.metadata.deletion_timestamp:
            self.waiting[uid] = claim
            return
        self.drop(uid)

    def drop(self, uid: str) -> None:
        """A claim cannot collide any more."""
        self.waiting.pop(uid, None)
        self.nominated.discard(uid)
        self.begun.discard(uid)
        for one in self.tentative.values():
            if one.rivals is not None:
                one.rivals.discard(uid)

    def expected(self, now: float) -> bool:
        """Whether an allocation written now has to be tentative."""
        if self.when != "auto":
            return self.when == "always"
        return bool(self.waiting) or now < self.last_seen + LATELY

    def begin(self, uid: str, claim: str) -> None:
        """An allocation of ours is written, to be confirmed."""
        self.tentative[uid] = Tentative(claim)

    def reserved(self, uid: str, now: float) -> None:
        """The scheduler has put a pod down on an allocation of ours: it knows of it."""
        one = self.tentative.get(uid)
        if one is not None and one.until is None:
            one.until = now + self.settle

    def came_back(self, uid: str) -> None:
        """Our write was seen: whoever may still collide is known now."""
        one = self.tentative.get(uid)
        if one is not None and one.rivals is None:
            one.rivals = set(self.waiting)

    def settled(self, now: float) -> list[str]:
        """Our claims that nobody can collide with any more."""
        return [
            uid
            for uid, one in self.tentative.items()
            if one.rivals is not None
            and (not one.rivals or (one.until is not None and now >= self._due(one, one.until)))
        ]

    @property
    def next_time(self) -> float | None:
        """When the next of them has had time enough."""
        times = [
            self._due(one, one.until) for one in self.tentative.values() if one.until is not None
        ]
        return min(times, default=None)

    def _due(self, one: Tentative, until: float) -> float:
        """When an allocation may be confirmed, though some who might collide go on waiting.

        What the scheduler has begun to write for one of them is waited for; but a finalizer also
        stays on a claim whose devices were taken away again.
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
            if selector.cel is not None
            for name in _DRIVER.findall(selector.cel.expression)
        ]
        if not named or not drivers.isdisjoint(named):
            return True
    return False
