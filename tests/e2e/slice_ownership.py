"""Computes the holder of every slice, from the journal and from the answers alone.

This module uses no code of the scheduler. A slice is a node, a GPU and a number, and has at most
one holder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from tests.e2e.call_log import Call, Kind

from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    Ended,
    ModelEntered,
    Moved,
    NodeAdded,
    NodeRemoved,
    NodeTurned,
    Part,
    Queued,
    Row,
    Served,
)

Slice = tuple[str, int, int]
"""A node, the index of a GPU on it, and the number of a slice."""


class Count(NamedTuple):
    """Totals of the cluster after an entry."""

    instances: int
    waiting: Mapping[str, int]
    """By tenant; a tenant is told its own only."""
    free_slices: int

    def told(self, tenant: str) -> tuple[int, int, int]:
        """Return what a tenant is told."""
        return self.instances, self.waiting.get(tenant, 0), self.free_slices


class SliceOwnership:
    """Follows the journal slice by slice, and keeps the state after every entry."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.problems: list[str] = []
        self.counts: list[Count] = [Count(0, {}, 0)]
        """Totals by entry number."""
        self.ended_by: dict[str, Row] = {}
        """The entry that ended each allocation."""
        self.active: dict[str, tuple[Part, ...]] = {}
        """The instances of each allocation that has not ended; none while it waits."""
        self.phases: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        """The entry number and phase of each phase change, by node."""
        self._states: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self._holder: dict[Slice, str] = {}
        self._waiting: Counter[str] = Counter()
        self._tenants: dict[str, str] = {}
        self._slices: dict[str, int] = {}
        self._gpus: dict[str, tuple[str, int]] = {}
        for row in rows:
            self._take(row)
            self.counts.append(self._count())

    def states(self, allocation: str, first: int, last: int) -> set[str]:
        """Return the states of an allocation after any of these entries."""
        return steps_between(self._states.get(allocation, []), first, last)

    def _count(self) -> Count:
        total = sum(self._slices[model] * gpus for model, gpus in self._gpus.values())
        instances = sum(map(len, self.active.values()))
        return Count(instances, dict(self._waiting), total - len(self._holder))

    def _take(self, row: Row) -> None:
        match row.entry:
            case ModelEntered(geometry):
                self._slices[geometry.model] = geometry.slices
            case NodeAdded(node, model, gpus):
                self._gpus[node] = model, gpus
                self.phases[node].append((row.seq, "ready"))
            case NodeTurned(node, phase):
                self.phases[node].append((row.seq, phase))
            case NodeRemoved(node):
                del self._gpus[node]
            case Allocated(record):
                self._begin(row, record, "placed")
                self._hold(row, record.id, record.parts)
            case Queued(record):
                self._begin(row, record, "queued")
            case Served(identity, _, parts):
                if self.active.get(identity) != ():
                    self._report(row, f"allocation {identity} is served but does not wait")
                self._states[identity].append((row.seq, "placed"))
                self._hold(row, identity, parts)
            case Moved(identity, _, index, part):
                self._move(row, identity, index, part)
            case Ended(record):
                self._end(row, record.id, record.state)
            case _:
                pass

    def _begin(self, row: Row, record: AllocationRecord, state: str) -> None:
        identity = record.id
        if identity in self._states:
            self._report(row, f"allocation {identity} begins a second time")
        self._states[identity].append((row.seq, state))
        self.active[identity] = ()
        self._tenants[identity] = record.tenant.name
        self._waiting[record.tenant.name] += 1

    def _hold(self, row: Row, identity: str, parts: tuple[Part, ...]) -> None:
        if self.active.get(identity) == ():
            self._waiting[self._tenants[identity]] -= 1
        self.active[identity] = parts
        for part in parts:
            for piece in slices_of(part):
                other = self._holder.setdefault(piece, identity)
                if other != identity:
                    self._report(row, f"{identity} overlaps {other} on {_name(piece)}")

    def _move(self, row: Row, identity: str, index: int, part: Part) -> None:
        """Move an instance; the new one exists before the old one ends, so the two must not
        overlap."""
        parts = list(self.active.get(identity, ()))
        if index >= len(parts):
            self._report(row, f"instance {index} of {identity} moves but does not exist")
            return
        old, parts[index] = parts[index], part
        for piece in slices_of(part):
            if piece in self._holder:
                self._report(row, f"{identity} moves to {_name(piece)}, which is taken")
            self._holder[piece] = identity
        for piece in slices_of(old):
            self._holder.pop(piece, None)
        self.active[identity] = tuple(parts)

    def _end(self, row: Row, identity: str, state: str) -> None:
        if identity not in self.active:
            self._report(row, f"allocation {identity} ends but is not active")
        if self.active.get(identity) == ():
            self._waiting[self._tenants[identity]] -= 1
        for part in self.active.pop(identity, ()):
            for piece in slices_of(part):
                if self._holder.get(piece) == identity:
                    del self._holder[piece]
        self._states[identity].append((row.seq, state))
        self.ended_by[identity] = row

    def _report(self, row: Row, what: str) -> None:
        self.problems.append(f"entry {row.seq}: {what}")


def steps_between(steps: list[tuple[int, str]], first: int, last: int) -> set[str]:
    """Return the values that held after any of these entries."""
    begin = bisect_right(steps, (first, "~")) - 1
    return {what for seq, what in steps[max(begin, 0) :] if seq <= last}


def slices_of(part: Part) -> Iterator[Slice]:
    """Return the slices of an instance."""
    return ((part.node, part.gpu, piece) for piece in range(part.start, part.start + part.size))


def _name(piece: Slice) -> str:
    return "slice {2} of GPU {1} of node {0}".format(*piece)


def overlaps(allocations: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the slices that two of these allocations hold, by the API's answers at one moment."""
    holder: dict[Slice, str] = {}
    found = []
    for allocation in allocations:
        for piece in answered_slices(allocation):
            other = holder.setdefault(piece, allocation["id"])
            if other != allocation["id"]:
                found.append(f"{allocation['id']} overlaps {other} on {_name(piece)}")
    return found


def answered_slices(allocation: Mapping[str, Any]) -> list[Slice]:
    """Return the slices of an allocation by the API's answer."""
    return [
        (part["node"], part["gpu"], piece)
        for part in allocation["instances"]
        for piece in range(part["start"], part["start"] + part["size"])
    ]


def overlaps_in_answers(calls: Sequence[Call]) -> list[str]:
    """Return overlaps that follow from the answers alone, independent of the journal.

    From the answer to its creation until its release or a move is requested, an allocation without
    a lease certainly held the slices of that answer. No two such intervals may overlap on one
    slice.
    """
    asked: dict[str, int] = {}
    for call in calls:
        if call.kind is Kind.RELEASE:
            asked.setdefault(call.subject, call.invoked)
        elif call.kind is Kind.MOVE:
            for move in msgspec.json.decode(call.body)["moves"]:
                asked.setdefault(move["allocation"], call.invoked)
    held: defaultdict[Slice, list[tuple[int, int, str]]] = defaultdict(list)
    for call in calls:
        if call.answered is None or call.status != 201:
            continue
        content = call.decoded()
        for allocation in content["allocations"] if call.kind is Kind.BATCH else [content]:
            if allocation["ends_at"] is None:
                until = asked.get(allocation["id"], 1 << 62)
                for piece in answered_slices(allocation):
                    held[piece].append((call.answered, until, allocation["id"]))
    found = []
    for piece, times in held.items():
        times.sort()
        for (_, until, one), (begin, _, other) in pairwise(times):
            if begin < until:
                found.append(f"by their answers, {one} and {other} both held {_name(piece)}")
    return found
