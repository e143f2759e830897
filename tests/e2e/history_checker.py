"""Checks that calls and answers are consistent with one sequential scheduler.

The journal provides the order: its rows, by number, are the order in which the calls took effect.
The history is correct if

- every answered call has exactly the rows that its answer implies, and every row has a cause;
- calls that did not overlap in time have their rows in that order;
- reads returned a state that existed between their start and their end;
- no slice ever has two holders, by the journal and by the answers alone;
- a fresh scheduler that gets the same requests in that order makes the same decisions, row by row,
  and gives the same answers, including rejections.

A call without an answer may have taken effect once, at any time, or never.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.e2e.call_log import LABEL, READS, Call, Kind
from tests.e2e.decision_replay import replay_decisions
from tests.e2e.slice_ownership import SliceOwnership, overlaps_in_answers, steps_between

from slicewise.control.state import State
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    Cause,
    Ended,
    ModelEntered,
    Moved,
    NodeAdded,
    NodeTurned,
    Part,
    Queued,
    Rejected,
    Reserved,
    Row,
    Served,
    TenantSet,
    TokenIssued,
    TurnTaken,
)

_PHASES = {"cordon": "cordoned", "uncordon": "ready"}


@dataclass
class Verdict:
    """The problems found by the checker, and how much it checked."""

    problems: list[str] = field(default_factory=list)
    rows: int = 0
    calls: int = 0
    written: int = 0
    """Calls with rows in the journal."""
    refused: int = 0
    """Rejections among them that were confirmed."""
    reads: int = 0
    unknown: int = 0
    batches: int = 0

    @property
    def clean(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __str__(self) -> str:
        return (
            f"{self.rows} rows in {self.batches} batches, {self.calls} calls: {self.written} "
            f"written ({self.refused} refusals), {self.reads} reads, {self.unknown} unanswered; "
            f"{len(self.problems)} problems"
        )


def check(
    rows: Sequence[Row],
    calls: Sequence[Call],
    fresh_state: Callable[[], State],
    staff: Collection[str] = (),
) -> Verdict:
    """Check calls and answers against the journal; ``staff`` are the actors of the setup."""
    verdict = Verdict(rows=len(rows), calls=len(calls))
    for row, expected in zip(rows, range(1, len(rows) + 1), strict=False):
        if row.seq != expected:
            verdict.problems.append(f"the journal has entry {row.seq} instead of {expected}")
            return verdict
    places = SliceOwnership(rows)
    owners = Owners(rows, calls, staff, places)
    verdict.problems += [
        *owners.problems,
        *places.problems,
        *overlaps_in_answers(calls),
        *_real_time(owners),
        *_reads(calls, owners, places),
    ]
    again = replay_decisions(rows, owners.by_row, fresh_state)
    verdict.problems += again.problems
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
    """Maps every row to its call, and every answer to its rows."""

    def __init__(
        self,
        rows: Sequence[Row],
        calls: Sequence[Call],
        staff: Collection[str],
        places: SliceOwnership,
    ) -> None:
        self.problems: list[str] = []
        self.by_row: dict[int, Call] = {}
        self.spans: dict[str, Span] = {}
        """Rows by the key of their call."""
        self._staff = {"service", *staff}
        self._labels: dict[str, Call] = {}
        self._made: dict[str, Row] = {}
        """The row that created an allocation, by label."""
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
                self._check_answer(call, places)
        for moves in self._moves.values():
            for call, move in moves:
                if call.known or call.key in self.spans:
                    self.problems.append(f"call {call.key} was answered, but {move} is lost")

    def _expect(self, call: Call) -> None:
        if call.kind in (Kind.CREATE, Kind.BATCH):
            for label, _ in wanted(call):
                self._labels[label] = call
            if not call.known or call.status == 409:
                self._refusable[call.actor].append(call)
        elif call.kind is Kind.RELEASE:
            self._releases.setdefault((call.actor, call.subject), call)
        elif call.kind is Kind.CORDON:
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
                self._find_cordon(row, entry)
            case Moved():
                self._find_move(row, entry)
            case ModelEntered() | NodeAdded() | TenantSet() | TokenIssued():
                if row.actor not in self._staff:
                    self._report(row, f"{row.actor} has a staff entry")
            case Served() | Reserved() | TurnTaken():
                pass  # no call causes these: replaying the decisions checks them
            case _:
                self._report(row, "unexpected kind of entry")

    def _find_creation(self, row: Row, record: AllocationRecord) -> None:
        label = record.labels.get(LABEL, "")
        call = self._labels.get(label)
        what = f"allocation {record.id}"
        if call is None:
            self._report(row, f"no call requested {what}")
        elif (row.actor, record.tenant.name) != (call.actor, call.tenant):
            self._report(row, f"{what} was requested by {call.actor}, not {row.actor}")
        elif label in self._made:
            self._report(row, f"{what} is the second one of call {label}")
        elif call.known and call.status not in (201, 202):
            self._report(row, f"{what} exists although call {label} was answered {call.status}")
        else:
            self._made[label] = row
            self._own(row, call)

    def _find_refusal(self, row: Row, entry: Rejected) -> None:
        """Find the call of a rejection, which has no label: each client makes one call at a time.

        An unanswered call is the last one of its client.
        """
        waiting = self._refusable[row.actor]
        if not waiting:
            self._report(row, f"no call got this rejection: {entry.detail}")
            return
        call = waiting.pop(0)
        if not any(_same_want(want, entry) for _, want in wanted(call)):
            self._report(row, f"call {call.key} requested something else than was rejected")
        if call.known and (call.decoded().get("reason"), call.decoded()["detail"]) != (
            entry.reason,
            entry.detail,
        ):
            self._report(row, f"call {call.key} got another reason: {call.decoded()}")
        self._own(row, call)

    def _find_end(self, row: Row, record: AllocationRecord) -> None:
        if record.cause is Cause.RELEASED:
            call = self._releases.get((row.actor, record.id))
            if call is None:
                self._report(row, f"no call requested the release of {record.id}")
            else:
                self._own(row, call)
        elif row.actor != "clock" or record.cause not in (Cause.LEASE, Cause.TIMEOUT):
            self._report(row, f"allocation {record.id} ended by {row.actor}: {record.cause}")

    def _find_cordon(self, row: Row, entry: NodeTurned) -> None:
        """Find the call of a cordon; these are made one at a time, and without a change there is no
        row."""
        turns = self._turns[row.actor]
        while turns:
            call = turns.pop(0)
            if (call.subject, _aim(call)) == (entry.node, entry.phase):
                self._own(row, call)
                return
        self._report(row, f"no call requested that node {entry.node} be {entry.phase}")

    def _find_move(self, row: Row, entry: Moved) -> None:
        moves = self._moves[row.actor]
        call, move = moves.pop(0) if moves else (None, {})
        part = entry.part
        target = (entry.allocation, entry.index, part.node, part.gpu, part.start)
        names = ("allocation", "index", "to_node", "to_gpu", "to_start")
        if call is None or target != tuple(move.get(name, 0) for name in names):
            self._report(row, f"no call requested the move of {target}")
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

    def _check_answer(self, call: Call, places: SliceOwnership) -> None:
        if call.kind is Kind.CREATE and call.status in (201, 202):
            self._check_creation(call, call.key, call.decoded())
        elif call.kind is Kind.BATCH and call.status == 201:
            content = call.decoded()["allocations"]
            for (label, _), one in zip(wanted(call), content, strict=True):
                self._check_creation(call, label, one)
        elif call.kind in (Kind.CREATE, Kind.BATCH) and call.status == 409:
            if call.key not in self.spans:
                self.problems.append(f"call {call.key} was rejected, but has no entry")
        elif call.kind is Kind.RELEASE:
            if call.status != 200:
                self.problems.append(f"call {call.key} got {call.status}: {call.decoded()}")
            elif call.subject not in places.ended_by:
                self.problems.append(
                    f"the release of {call.subject} by call {call.key} was answered but is lost"
                )

    def _check_creation(self, call: Call, label: str, content: dict[str, Any]) -> None:
        row = self._made.get(label)
        if row is None:
            self.problems.append(
                f"allocation {content['id']} of call {label} was answered {call.status} but is lost"
            )
            return
        kind = Allocated if call.status == 201 else Queued
        entry = row.entry
        if not isinstance(entry, kind):
            self._report(row, f"call {label} was answered {call.status}, which does not match")
            return
        record = entry.allocation
        if record.id != content["id"]:
            self._report(row, f"call {label} got the id {content['id']}, not {record.id}")
        if record.parts != msgspec.convert(content["instances"], tuple[Part, ...]):
            self._report(row, f"call {label} got another placement")

    def _report(self, row: Row, what: str) -> None:
        self.problems.append(f"entry {row.seq}: {what}")


def wanted(call: Call) -> list[tuple[str, dict[str, Any]]]:
    """Return the terms of every allocation that a call asked for, by label."""
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
    """Check that calls that did not overlap have their rows in real-time order."""
    problems = []
    latest: Span | None = None  # the latest start among calls with earlier rows
    for span in sorted(owners.spans.values(), key=lambda span: span.first):
        answered = span.call.answered
        if latest is not None and answered is not None and answered < latest.call.invoked:
            problems.append(
                f"call {span.call.key} was answered before call {latest.call.key} was made, but "
                f"its entry {span.first} comes after entry {latest.last}"
            )
        if latest is None or span.call.invoked > latest.call.invoked:
            latest = span
    return problems


def _reads(calls: Sequence[Call], owners: Owners, places: SliceOwnership) -> list[str]:
    """Check that every read returned a state that existed between its start and its end."""
    writes = list(owners.spans.values())
    done = sorted((s.call.answered, s.last) for s in writes if s.call.answered is not None)
    begun = sorted((s.call.invoked, s.first) for s in writes)
    seen = [0]  # the last row that must be visible, after so many answers
    for _, last in done:
        seen.append(max(seen[-1], last))
    unseen = [len(places.counts)]  # the first row that cannot be visible yet, from the end
    for _, first in reversed(begun):
        unseen.append(min(unseen[-1], first))
    unseen.reverse()
    problems = []
    for call in calls:
        # A cordon that changed nothing is a read of the node.
        looks = call.kind in READS or (call.kind is Kind.CORDON and call.key not in owners.spans)
        if not looks or call.answered is None:
            continue
        first = 0 if call.lagging else seen[bisect_left(done, (call.invoked, 0))]
        last = unseen[bisect_left(begun, (call.answered, 0))] - 1
        problem = _read(call, first, last, places)
        if problem is not None:
            problems.append(
                f"call {call.key} could see the entries from {first} to {last}, but {problem}"
            )
    return problems


def _read(call: Call, first: int, last: int, places: SliceOwnership) -> str | None:
    content = call.decoded()
    if call.kind is Kind.CLUSTER:
        seq = content["seq"]
        if not first <= seq <= last:
            return f"saw entry {seq}"
        told = content["instances"], content["waiting"], content["free_slices"]
        if told != places.counts[seq].told(call.tenant):
            return f"got {told} for entry {seq}, which was {places.counts[seq]}"
        return None
    if call.kind is Kind.CORDON:
        phases = steps_between(places.phases[call.subject], first, last)
        return None if _aim(call) in phases else f"no entry changes the phase of {call.subject}"
    states = places.states(call.subject, first, last)
    if call.status == 404:
        return None if call.lagging else f"got no {call.subject}"
    if content["state"] not in states:
        return f"got state {content['state']} of {call.subject}, which was {sorted(states)}"
    return None
