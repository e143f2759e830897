"""An index of allocations: pages of them by tenant, state or label, without looking at the rest.

Each list is in the order in which its allocations were requested. They are requested in that order
as well, so adding one is nearly always an append. What leaves a list stays in it as a stale entry,
until half of the list is stale and it is cleaned up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from slicewise.control.entries import AllocationRecord, Seconds

Place = tuple[Seconds, str]
"""Where an allocation stands in the order of requests: when it was requested, and its id."""
Key = tuple[str, ...]
EVERY: Key = ("every",)
_SPARE = 32
"""Stale entries that are not worth a clean-up."""


def place_of(record: AllocationRecord) -> Place:
    """Where an allocation stands in the order of requests."""
    return record.requested, record.id


def keys_of(record: AllocationRecord) -> list[Key]:
    """The lists an allocation is in; one that is leaving is in a single one."""
    state: Key = ("state", record.state)
    if record.ended is not None:
        return [state]
    labels = record.labels
    keys = [EVERY, ("tenant", record.tenant), state]
    return keys + [("label", key, value) for key, value in labels.items()] if labels else keys


class _List:
    __slots__ = ("places", "stale")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.stale = 0


class AllocationIndex:
    """Finds the allocations of a state; the state tells it what changes."""

    def __init__(self) -> None:
        self._lists: dict[Key, _List] = {}
        self._keys: dict[str, list[Key]] = {}
        """By allocation: the lists it is in."""

    def put(self, record: AllocationRecord) -> None:
        """An allocation is new, or has changed."""
        before, after = self._keys.get(record.id), keys_of(record)
        if before == after:
            return
        place = place_of(record)
        self._keys[record.id] = after
        if before is None:
            for key in after:
                self._add(key, place)
            return
        for key in after:
            if key not in before:
                self._add(key, place)
        for key in before:
            if key not in after:
                self._leave(key)

    def remove(self, identity: str) -> None:
        """An allocation is gone."""
        for key in self._keys.pop(identity):
            self._leave(key)

    def _add(self, key: Key, place: Place) -> None:
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = _List()
        places = found.places
        if not places or places[-1] < place:
            places.append(place)
            return
        at = bisect_left(places, place)
        if places[at] == place:  # it has been here before
            found.stale -= 1
        else:
            places.insert(at, place)

    def _leave(self, key: Key) -> None:
        found = self._lists[key]
        found.stale += 1
        left = len(found.places) - found.stale
        if not left:
            del self._lists[key]
        elif found.stale > left + _SPARE:
            found.places = [place for place in found.places if self._has(key, place[1])]
            found.stale = 0

    def _has(self, key: Key, identity: str) -> bool:
        return key in self._keys.get(identity, ())

    def count(self, key: Key) -> int:
        """How many allocations a list has."""
        found = self._lists.get(key)
        return 0 if found is None else len(found.places) - found.stale

    def walk(self, key: Key, mark: Place | None, backward: bool = False) -> Iterator[Place]:
        """The places of a list behind a mark, or those in front of it from there on backward.

        Stale entries are among them: the caller looks at each allocation anyway. The list must
        not change meanwhile.
        """
        found = self._lists.get(key)
        if found is None:
            return
        places = found.places
        if backward:
            end = len(places) if mark is None else bisect_left(places, mark)
            for at in range(end - 1, -1, -1):
                yield places[at]
        else:
            begin = 0 if mark is None else bisect_right(places, mark)
            for at in range(begin, len(places)):
                yield places[at]
