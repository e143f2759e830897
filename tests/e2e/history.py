"""The history checker: whether calls and answers agree with some order of one scheduler.

The journal is the witness: its rows, in the order of their numbers, are the order in which the
calls are said to have happened. It is a good one if

- every answered call has exactly the rows its answer speaks of, and no row comes of nothing;
- calls that did not overlap in time have their rows in that order;
- reads saw what was true at one moment between their beginning and their end;
- no slice ever has two holders, by the journal and by the answers alone;
- a fresh scheduler that is asked the same in that order decides the same, row by row, and gives
  the same answers, refusals included.

A call that nobody answered may have happened once, at any time, or never.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.e2e.places import Places, overlaps_in_answers, steps_between
from tests.e2e.record import LABEL, READS, Call, Kind
from tests.e2e.redeciding import redecide

from slicewise.control.entries import (
    Allocated,
    AllocationRecord,
    Cause,
    Ended,
    ModelEntered,
    Moved,
    NodeAdded,
    NodeTurned,
    Overtaken,
    Part,
    Queued,
    Rejected,
    Row,
    Served,
    TenantSet,
    TokenIssued,
    TurnTaken,
)
from slicewise.control.state import State

_PHASES = {"cordon": "cordoned", "uncordon": "ready"}


@dataclass
class Verdict:
    """What the checker found, and how much it looked at."""

    complaints: list[str] = field(default_factory=list)
    rows: int = 0
    calls: int = 0
    written: int = 0
    """Calls that have rows in the journal."""
    refused: int = 0
    """Of those, refusals that were found right."""
    reads: int = 0
    unknown: int = 0
    batches: int = 0

    @property
    def clean(self) -> bool:
        """Whether there is nothing to complain about."""
        return not self.complaints

    def __str__(self) -> str:
        return (
            f"{self.rows} rows in {self.batches} batches, {self.calls} calls: {self.written} "
            f"written ({self.refused} refusals), {self.reads} reads, {self.unknown} unanswered; "
            f"{len(self.complaints)} complaints"
        )


def check(
    rows: Sequence[Row],
    calls: Sequence[Call],
    fresh_state: Callable[[], State],
    staff: Collection[str] = (),
) -> Verdict:
    """Hold calls and answers against the journal; ``staff`` are those who set everything up."""
    verdict = Verdict(rows=len(rows), calls=len(calls))
    for row, expected in zip(rows, range(1, len(rows) + 1), strict=False):
        if row.seq != expected:
            verdict.complaints.append(f"the journal has entry {row.seq} in place of {expected}")
            return verdict
    places = Places(rows)
    owners = Owners(rows, calls, staff, places)
    verdict.complaints += [
        *owners.complaints,
        *places.complaints,
        *overlaps_in_answers(calls),
        *_real_time(owners),
        *_reads(calls, owners, places),
    ]
    again = redecide(rows, owners.by_row, fresh_state)
    verdict.complaints += again.complaints
    verdict.batches = again.batches
    verdict.written = len(owners.spans)
    verdict.refused = again.refused
    verdict.reads = sum(call.kind in READS and call.known for call in calls)
    verdict.unknown = sum(not call.known for call in calls)
    return verdict


@dataclass(slots=True)
class Span:
    """The rows of one call."""

    call: Call
    first: int
    last: int


class Owners:
    """Finds for every row the call it comes of, and for every answer its rows."""

    def __init__(
        self, rows: Sequence[Row], calls: Sequence[Call], staff: Collection[str], places: Places
    ) -> None:
        self.complaints: list[str] = []
        self.by_row: dict[int, Call] = {}
        self.spans: dict[str, Span] = {}
        """By key of the call."""
        self._staff = {"service", *staff}
        self._labels: dict[str, Call] = {}
        self._made: dict[str, Row] = {}
        """By label: the row that made an allocation."""
        self._releases: dict[tuple[str, str], Call] = {}
        self._refusable: defaultdict[str, list[Call]] = defaultdict(list)
        self._turns: defaultdict[str, list[Call]] = defaultdict(list)
        self._moves: defaultdict[str, list[tuple[Call, dict[str, Any]]]] = defaultdict(list)
        for call in calls:
            self._expect(call)
        for row in rows:
            self._find(row)
        for call in calls:
            if call.known:
                self._look_at(call, places)
        for moves in self._moves.values():
            for call, move in moves:
                if call.known or call.key in self.spans:
                    self.complaints.append(f"call {call.key} was answered, and {move} is lost")

    def _expect(self, call: Call) -> None:
        if call.kind in (Kind.CREATE, Kind.BATCH):
            for label, _ in wanted(call):
                self._labels[label] = call
            if not call.known or call.status == 409:
                self._refusable[call.actor].append(call)
        elif call.kind is Kind.RELEASE:
            self._releases.setdefault((call.actor, call.subject), call)
        elif call.kind is Kind.TURN:
            self._turns[call.actor].append(call)
        elif call.kind is Kind.MOVE and (call.status == 200 or not call.known):
            moves = msgspec.json.decode(call.body)["moves"]
            self._moves[call.actor] += [(call, move) for move in moves]

    # From rows to calls

    def _find(self, row: Row) -> None:
        entry = row.entry
        match entry:
            case Allocated(record) | Queued(record):
                self._find_creation(row, record)
            case Rejected():
                self._find_refusal(row, entry)
            case Ended(record):
                self._find_end(row, record)
            case NodeTurned():
                self._find_turn(row, entry)
            case Moved():
                self._find_move(row, entry)
            case ModelEntered() | NodeAdded() | TenantSet() | TokenIssued():
                if row.actor not in self._staff:
                    self._complain(row, f"{row.actor} did what only staff does")
            case Served() | Overtaken() | TurnTaken():
                pass  # nobody asks for these: deciding again tells whether they are right
            case _:
                self._complain(row, "this kind of entry is not expected here")

    def _find_creation(self, row: Row, record: AllocationRecord) -> None:
        label = record.labels.get(LABEL, "")
        call = self._labels.get(label)
        what = f"allocation {record.id}"
        if call is None:
            self._complain(row, f"nobody asked for {what}")
        elif (row.actor, record.tenant) != (call.actor, call.tenant):
            self._complain(row, f"{what} was asked for by {call.actor}, not {row.actor}")
        elif label in self._made:
            self._complain(row, f"{what} is a second one for call {label}")
        elif call.known and call.status not in (201, 202):
            self._complain(row, f"{what} is there though call {label} was told {call.status}")
        else:
            self._made[label] = row
            self._own(row, call)

    def _find_refusal(self, row: Row, entry: Rejected) -> None:
        """A refusal bears no label, but each client makes one call after the other.

        One that nobody answered is its client's last.
        """
        waiting = self._refusable[row.actor]
        if not waiting:
            self._complain(row, f"nobody was told of a refusal: {entry.detail}")
            return
        call = waiting.pop(0)
        if not any(_same_want(want, entry) for _, want in wanted(call)):
            self._complain(row, f"call {call.key} did not ask for what was refused")
        if call.known and (call.said().get("reason"), call.said()["detail"]) != (
            entry.reason,
            entry.detail,
        ):
            self._complain(row, f"call {call.key} was told another reason: {call.said()}")
        self._own(row, call)

    def _find_end(self, row: Row, record: AllocationRecord) -> None:
        if record.cause is Cause.RELEASED:
            call = self._releases.get((row.actor, record.id))
            if call is None:
                self._complain(row, f"nobody asked for the release of {record.id}")
            else:
                self._own(row, call)
        elif row.actor != "clock" or record.cause not in (Cause.LEASE, Cause.TIMEOUT):
            self._complain(row, f"allocation {record.id} ended by {row.actor}: {record.cause}")

    def _find_turn(self, row: Row, entry: NodeTurned) -> None:
        """Turns are made one after the other; those that change nothing have no row."""
        turns = self._turns[row.actor]
        while turns:
            call = turns.pop(0)
            if (call.subject, _aim(call)) == (entry.node, entry.phase):
                self._own(row, call)
                return
        self._complain(row, f"nobody asked that node {entry.node} be {entry.phase}")

    def _find_move(self, row: Row, entry: Moved) -> None:
        moves = self._moves[row.actor]
        call, move = moves.pop(0) if moves else (None, {})
        part = entry.part
        target = (entry.allocation, entry.index, part.node, part.gpu, part.start)
        names = ("allocation", "index", "to_node", "to_gpu", "to_start")
        if call is None or target != tuple(move.get(name, 0) for name in names):
            self._complain(row, f"nobody asked for the move of {target}")
        else:
            self._own(row, call)

    def _own(self, row: Row, call: Call) -> None:
        self.by_row[row.seq] = call
        span = self.spans.get(call.key)
        if span is None:
            self.spans[call.key] = Span(call, row.seq, row.seq)
        else:
            span.last = row.seq

    # From answers to rows

    def _look_at(self, call: Call, places: Places) -> None:
        if call.kind is Kind.CREATE and call.status in (201, 202):
            self._look_at_creation(call, call.key, call.said())
        elif call.kind is Kind.BATCH and call.status == 201:
            said = call.said()["allocations"]
            for (label, _), one in zip(wanted(call), said, strict=True):
                self._look_at_creation(call, label, one)
        elif call.kind in (Kind.CREATE, Kind.BATCH) and call.status == 409:
            if call.key not in self.spans:
                self.complaints.append(f"call {call.key} was refused, and no entry tells of it")
        elif call.kind is Kind.RELEASE:
            if call.status != 200:
                self.complaints.append(f"call {call.key} was told {call.status}: {call.said()}")
            elif call.subject not in places.ended_by:
                self.complaints.append(
                    f"the release of {call.subject} by call {call.key} was answered and is lost"
                )

    def _look_at_creation(self, call: Call, label: str, said: dict[str, Any]) -> None:
        row = self._made.get(label)
        if row is None:
            self.complaints.append(
                f"allocation {said['id']} of call {label} was answered {call.status} and is lost"
            )
            return
        kind = Allocated if call.status == 201 else Queued
        entry = row.entry
        if not isinstance(entry, kind):
            self._complain(row, f"call {label} was answered {call.status}, which this is not")
            return
        record = entry.allocation
        if record.id != said["id"]:
            self._complain(row, f"call {label} was told the id {said['id']}, not {record.id}")
        if record.parts != msgspec.convert(said["instances"], tuple[Part, ...]):
            self._complain(row, f"call {label} was told another place than this")

    def _complain(self, row: Row, what: str) -> None:
        self.complaints.append(f"entry {row.seq}: {what}")


def wanted(call: Call) -> list[tuple[str, dict[str, Any]]]:
    """What a call asked for: every allocation by its label."""
    body = msgspec.json.decode(call.body)
    every = body["allocations"] if call.kind is Kind.BATCH else [body]
    return [(one["labels"][LABEL], one) for one in every]


def _same_want(asked: dict[str, Any], entry: Rejected) -> bool:
    need = asked.get("need") or {"compute": None, "memory_gb": None}
    want = entry.want
    return (
        asked.get("profile"),
        need["compute"],
        need["memory_gb"],
        tuple(asked.get("models", ())),
        asked.get("count", 1),
    ) == (want.profile, want.compute, want.memory_gb, want.models, entry.count)


def _aim(call: Call) -> str:
    return _PHASES[call.path.rpartition("/")[2]]


def _real_time(owners: Owners) -> list[str]:
    """A call that was answered before another was made has its rows in front of the other's."""
    complaints = []
    latest: Span | None = None  # made last, of those whose rows come first
    for span in sorted(owners.spans.values(), key=lambda span: span.first):
        answered = span.call.answered
        if latest is not None and answered is not None and answered < latest.call.invoked:
            complaints.append(
                f"call {span.call.key} was answered before call {latest.call.key} was made, and "
                f"its entry {span.first} comes after entry {latest.last}"
            )
        if latest is None or span.call.invoked > latest.call.invoked:
            latest = span
    return complaints


def _reads(calls: Sequence[Call], owners: Owners, places: Places) -> list[str]:
    """What was read was true at a moment between asking and being answered."""
    writes = list(owners.spans.values())
    done = sorted((s.call.answered, s.last) for s in writes if s.call.answered is not None)
    begun = sorted((s.call.invoked, s.first) for s in writes)
    seen = [0]  # the last row that must have been seen, once so many calls were answered
    for _, last in done:
        seen.append(max(seen[-1], last))
    unseen = [len(places.counts)]  # the first row that cannot have been seen, from the end
    for _, first in reversed(begun):
        unseen.append(min(unseen[-1], first))
    unseen.reverse()
    complaints = []
    for call in calls:
        # A turn that changed nothing is a look at the node.
        looks = call.kind in READS or (call.kind is Kind.TURN and call.key not in owners.spans)
        if not looks or call.answered is None:
            continue
        first = 0 if call.lagging else seen[bisect_left(done, (call.invoked, 0))]
        last = unseen[bisect_left(begun, (call.answered, 0))] - 1
        problem = _read(call, first, last, places)
        if problem is not None:
            complaints.append(
                f"call {call.key} could see the entries from {first} to {last}, and {problem}"
            )
    return complaints


def _read(call: Call, first: int, last: int, places: Places) -> str | None:
    said = call.said()
    if call.kind is Kind.CLUSTER:
        seq = said["seq"]
        if not first <= seq <= last:
            return f"saw entry {seq}"
        told = said["instances"], said["waiting"], said["free_slices"]
        if told != places.counts[seq]:
            return f"was told {told} of entry {seq}, which was {places.counts[seq]}"
        return None
    if call.kind is Kind.TURN:
        phases = steps_between(places.phases[call.subject], first, last)
        return None if _aim(call) in phases else f"no entry tells that {call.subject} was turned"
    states = places.states(call.subject, first, last)
    if call.status == 404:
        return None if call.lagging else f"was told that there is no {call.subject}"
    if said["state"] not in states:
        return f"was told that {call.subject} is {said['state']}, which was {sorted(states)}"
    return None
