"""Gangs: pods that get their devices all together, across nodes, or none of them.

Annotations of the pods name a gang of their namespace and its size. Once so many pods are there and
ready, they are one request. Their allocations are tentative, and confirmed when the last of them is
written: until then kube-scheduler binds none of the pods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.event_recorder import INVALID, PlacementMessage
from slicewise.kubernetes.pending_claims import GANG, SIZE, PendingClaims, PendingPod

WAITS = "Gang"
"""The reason of a pod that waits for the others of its gang."""
STUCK_SECONDS = 30.0
"""How long some of a gang keep their devices while others cannot be placed."""
MOST = 256

_NUMBER = re.compile("[1-9][0-9]{0,2}")


class Unit(NamedTuple):
    """The pods of a gang that are placed together now, or why there are none."""

    members: tuple[PendingPod, ...]
    """In order of age; the first is the one that stands in line for all."""
    text: str = ""
    invalid: bool = False

    def led_by(self, key: str) -> bool:
        """Whether a pod stands in line for these."""
        return bool(self.members) and self.members[0].key == key


class Gangs:
    """Finds the pods that are placed together."""

    def __init__(
        self, pending: PendingClaims, writing: Callable[[str], bool], clock: Callable[[], float]
    ) -> None:
        """``writing`` tells whether the devices of a pod are being written."""
        self._pending = pending
        self._writing = writing
        self._clock = clock
        self._units: dict[str, Unit] = {}
        """By gang: its unit, until something changes."""
        self.standing: dict[int, Unit] = {}
        """By ticket number of a pod that stands in line for others of its gang: all of them."""
        self._partial: dict[str, float] = {}
        """By gang of which some have devices and are held back: since when."""

    def forget_units(self) -> None:
        """Note that pods or claims have changed."""
        self._units.clear()

    def take_changed(self) -> list[str]:
        """The pods of the gangs that have gained or lost a pod."""
        changed, self._pending.changed_gangs = self._pending.changed_gangs, set()
        return [key for gang in sorted(changed) for key in self._pending.gangs.get(gang, ())]

    def companions(self, key: str) -> Iterable[str]:
        """The pods of a pod's gang."""
        pod = self._pending.pods.get(key)
        gang = None if pod is None else self._pending.gang_key(pod)
        return () if gang is None else tuple(self._pending.gangs.get(gang, ()))

    def unit(self, pending_pod: PendingPod) -> Unit | None:
        """The unit of a waiting pod; None for a pod that is placed on its own."""
        key = self._pending.gang_key(pending_pod.pod)
        if key is None:
            annotations = pending_pod.pod.metadata.annotations
            if SIZE in annotations:
                return Unit((), f"annotation {SIZE} without {GANG}", True)
            return None
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = self._find(key)
        return None if len(unit.members) == 1 and unit.led_by(pending_pod.key) else unit

    def stand(self, number: int, unit: Unit | None) -> None:
        """Note the pods that a ticket stands for; None: its own pod alone."""
        if unit is None:
            self.standing.pop(number, None)
        else:
            self.standing[number] = unit

    def placed_with(self, number: int, waiting: Mapping[int, PendingPod]) -> tuple[PendingPod, ...]:
        """The pods that a ticket stands for: one, or those of a gang."""
        unit = self.standing.get(number)
        return (waiting[number],) if unit is None else unit.members

    def _find(self, key: str) -> Unit:
        size, problem = self._size(key)
        if problem:
            return Unit((), problem, True)
        placed, waiting = self._count(key)
        need = size - placed
        name = key.partition("/")[2]
        if need <= 0:  # an extra pod, or one in the place of another
            need = 1
        if len(waiting) < need:
            there = placed + len(waiting)
            return Unit((), f"{there} of the {size} pods of gang {name!r} are there and ready")
        members = tuple(waiting[:need])
        claims = [claim.metadata.uid for one in members for claim, _ in one.claims]
        if len(set(claims)) < len(claims):
            text = f"two pods of gang {name!r} share a claim that has no devices yet"
            return Unit((), text, True)
        first = members[0].pod.metadata.name
        text = f"the {need} pods of gang {name!r} get devices together: see pod {first!r}"
        return Unit(members, text)

    def _size(self, key: str) -> tuple[int, str]:
        """The size of a gang, and what is wrong with it."""
        sizes = {
            pod.metadata.annotations.get(SIZE, "") for pod in self._pending.gangs[key].values()
        }
        name = key.partition("/")[2]
        for size in sorted(sizes):
            if not _NUMBER.fullmatch(size) or int(size) > MOST:
                text = f"annotation {SIZE}: {size[:40]!r} is not a number from 1 to {MOST}"
                return 0, f"gang {name!r}: {text}"
        if len(sizes) > 1:
            return 0, f"gang {name!r}: its pods differ in {SIZE}: {', '.join(sorted(sizes))}"
        return int(sizes.pop()), ""

    def _count(self, key: str) -> tuple[int, list[PendingPod]]:
        """How many pods of a gang have devices or have ended well, and those that wait."""
        placed, waiting = 0, []
        for pod in sorted(self._pending.gangs[key].values(), key=_age):
            if pod.over or self._writing(pod.metadata.key):
                placed += 1
                continue
            if pod.metadata.deletion_timestamp:
                continue
            pending = self._pending.pending_pod(pod.metadata.key)
            if pending is not None:
                waiting.append(pending)
            elif self._pending.node(pod.metadata.key) is not None:
                placed += 1
        return placed, waiting

    def message(self, pending_pod: PendingPod) -> PlacementMessage | None:
        """Why a pod of a gang is in no line of its own."""
        unit = self.unit(pending_pod)
        if unit is None or not unit.text:
            return None
        return PlacementMessage(False, INVALID if unit.invalid else WAITS, unit.text)

    # Holding back

    def holds(self, claim: ResourceClaim) -> bool:
        """Whether a claim must not be confirmed yet: others of its gang have no devices."""
        for user in self._pending.users(claim.metadata.key):
            key = self._pending.gang_key(self._pending.pods[user])
            if key is not None and not self._complete(key):
                self._partial.setdefault(key, self._clock())
                return True
        return False

    def _complete(self, key: str) -> bool:
        size, problem = self._size(key)
        written = sum(
            pod.over
            or (
                self._pending.pending_pod(pod.metadata.key) is None
                and self._pending.node(pod.metadata.key) is not None
            )
            for pod in self._pending.gangs[key].values()
        )
        return not problem and written >= size

    def take_stuck(self) -> list[ResourceClaim]:
        """The claims to give up, because others of their gang cannot be placed."""
        now, claims = self._clock(), []
        for key, since in list(self._partial.items()):
            if key not in self._pending.gangs or self._complete(key):
                del self._partial[key]
            elif since + STUCK_SECONDS <= now:
                del self._partial[key]
                for pod in self._pending.gangs[key].values():
                    if not pod.over and not pod.spec.node_name:
                        claims += [
                            claim
                            for claim in self._pending.claims_of(pod)
                            if claim.status.allocation is not None
                        ]
        return claims

    def clear(self) -> None:
        """Forget since when claims are held back: another replica leads now."""
        self._partial.clear()

    @property
    def next_time(self) -> float | None:
        """When the next incomplete gang gives its devices up."""
        return min((since + STUCK_SECONDS for since in self._partial.values()), default=None)


def _age(pod: Pod) -> tuple[float, str]:
    return parse_time(pod.metadata.creation_timestamp, 0.0), pod.metadata.key
