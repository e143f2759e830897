"""An index of allocations by tenant, state and label, for paged lists.

Each list is sorted by the time of the request. Allocations arrive in that order, so adding one is
nearly always an append. A removed one stays as a stale place until half of the list is stale; then
the list is compacted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from slicewise.journal.entries import AllocationRecord, Seconds

Place = tuple[Seconds, str]
"""The sort key of an allocation: the time of its request, and its id."""
Key = tuple[str, ...]
"""The key of a list, such as ``("state", "queued")``."""
EVERY: Key = ("every",)
_SPARE = 32
"""Stale places that are not worth compacting a list."""


def place_of(record: AllocationRecord) -> Place:
    """Return the sort key of an allocation."""
    return record.requested, record.id


def keys_of(record: AllocationRecord) -> list[Key]:
    """Return the keys of the lists that contain an allocation; leaving ones are in one list."""
    state: Key = ("state", record.state)
    if record.ended is not None:
        return [state]
    labels = record.labels
    keys = [EVERY, ("tenant", record.tenant.id), state]
    return keys + [("label", key, value) for key, value in labels.items()] if labels else keys


class _List:
    __slots__ = ("places", "stale")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.stale = 0


class AllocationIndex:
    """Lists the allocations of a state, which updates it with every change."""

    def __init__(self) -> None:
        self._lists: dict[Key, _List] = {}
        self._keys: dict[str, list[Key]] = {}
        """The keys of the lists that contain an allocation."""

    def put(self, record: AllocationRecord) -> None:
        """Add an allocation, or update a changed one."""
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
                self._drop(key)

    def remove(self, identity: str) -> None:
        """Remove an allocation."""
        for key in self._keys.pop(identity):
            self._drop(key)

    def _add(self, key: Key, place: Place) -> None:
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = _List()
        places = found.places
        if not places or places[-1] < place:
            places.append(place)
            return
        at = bisect_left(places, place)
        if places[at] == place:  # a stale place, used again
            found.stale -= 1
        else:
            places.insert(at, place)

    def _drop(self, key: Key) -> None:
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
        """Return the number of allocations in a list."""
        found = self._lists.get(key)
        return 0 if found is None else len(found.places) - found.stale

    def walk(self, key: Key, mark: Place | None, backward: bool = False) -> Iterator[Place]:
        """Yield the places of a list after a mark; those before it, in reverse, if ``backward``.

        Stale places are included: the caller looks up each allocation anyway. The list must not
        change during the iteration.
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
