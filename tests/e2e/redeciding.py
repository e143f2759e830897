"""Deciding again: a fresh scheduler is asked the same in the same order, and must do the same.

The rows of one batch bear the same time. In each batch the clock comes first, then the commands,
then the queue, as in the writer. Commands are made again from what was asked, not from what was
decided, so every place, every refusal and every turn in the queue is decided a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec
from tests.e2e.record import Call, Kind

from slicewise import load_geometry
from slicewise.control.actors import internal
from slicewise.control.answers import Answer
from slicewise.control.commands import (
    AddNode,
    CarryOut,
    Command,
    Cordon,
    Create,
    CreateAll,
    IssueToken,
    MoveInstance,
    Release,
    SetTenant,
    Terms,
    Uncordon,
)
from slicewise.control.desk import Desk
from slicewise.control.entries import (
    Allocated,
    Ended,
    ModelEntered,
    Moved,
    NodeAdded,
    NodePhase,
    NodeTurned,
    Overtaken,
    Queued,
    Rejected,
    Row,
    Served,
    TenantSet,
    TokenIssued,
    TurnTaken,
    Want,
)
from slicewise.control.geometries import record_of
from slicewise.control.reports import MovesBody
from slicewise.control.state import State
from slicewise.control.wire import AllocationBody, BatchBody

_QUEUE = "queue"
_ON_THE_WAY = (Served, Overtaken, TurnTaken, ModelEntered)
"""Entries that stand in front of the one that tells what was asked for."""


@dataclass
class Again:
    """What came of deciding again."""

    complaints: list[str] = field(default_factory=list)
    batches: int = 0
    refused: int = 0


class _DifferentError(Exception):
    """The second time it was decided otherwise; nothing behind it can be compared."""


def redecide(
    rows: Sequence[Row], owners: Mapping[int, Call], fresh_state: Callable[[], State]
) -> Again:
    """Decide everything again, up to the first difference."""
    again = Again()
    clerk = _Clerk(fresh_state(), owners, again)
    try:
        for _, batch in groupby(rows, key=lambda row: row.at):
            clerk.take(list(batch))
            again.batches += 1
    except _DifferentError as difference:
        again.complaints.append(str(difference))
    return again


class _Clerk:
    """Goes through the batches with a desk of its own."""

    def __init__(self, state: State, owners: Mapping[int, Call], again: Again) -> None:
        self._ids: Iterator[str] = iter(())
        self._desk = Desk(state, lambda letter: next(self._ids, f"{letter}-refused"))
        self._owners = owners
        self._again = again

    def take(self, batch: list[Row]) -> None:
        """One batch, as the writer did it."""
        at = batch[0].at
        self._desk.pass_time(at)
        rest = self._compare(batch)
        while rest and rest[0].actor != _QUEUE:
            rest = self._command(rest)
        self._desk.serve_queue(at)
        rest = self._compare(rest)
        if rest:
            raise _DifferentError(f"entry {rest[0].seq}: decided again, there is no {_tell(rest)}")

    def _compare(self, expected: list[Row]) -> list[Row]:
        """Hold what was decided against what should come; returns what comes after it."""
        rows = self._desk.take_rows()
        for row, other in zip(rows, expected, strict=False):
            if row != other:
                raise _DifferentError(
                    f"entry {other.seq}: decided again it is another one: {_tell([row])} "
                    f"instead of {_tell([other])}"
                )
        if len(rows) > len(expected):
            missing = rows[len(expected) :]
            raise _DifferentError(
                f"entry {missing[0].seq}: decided again, here comes {_tell(missing)}"
            )
        return expected[len(rows) :]

    def _command(self, rest: list[Row]) -> list[Row]:
        """The next command of a batch."""
        head = next(
            (
                row
                for row in rest
                if row.actor == rest[0].actor and not isinstance(row.entry, _ON_THE_WAY)
            ),
            None,
        )
        if head is None:
            raise _DifferentError(f"entry {rest[0].seq}: belongs to nothing that was asked for")
        call = self._owners.get(head.seq)
        command = self._made_again(head, call)
        self._ids = iter(_ids(rest))
        answer = self._desk.decide(command, internal(head.actor, head.origin), head.at)
        after = self._compare(rest)
        if len(after) == len(rest):
            raise _DifferentError(
                f"entry {head.seq}: decided again nothing is written, and the answer is {answer}"
            )
        if call is not None and call.known and call.status != 503:
            self._compare_answers(head, call, answer)
        return after

    def _compare_answers(self, row: Row, call: Call, answer: Answer) -> None:
        if call.kind is Kind.TURN and call.sent > 1:
            return  # turned by the first sending, and answered to the last
        if (call.status, call.answer) != answer:
            self._again.complaints.append(
                f"entry {row.seq}: call {call.key} was told {call.status} {call.answer!r}, and "
                f"decided again it is {answer.status} {answer.body!r}"
            )
        elif call.status == 409:
            self._again.refused += 1

    def _made_again(self, row: Row, call: Call | None) -> Command:
        match row.entry:
            case Allocated() | Queued() | Rejected() if call is not None:
                return _creation(call)
            case Ended(record) if call is not None:
                return Release(record.id, call.tenant)
            case Moved() if call is not None:
                return _moves(call)
            case NodeTurned(node, NodePhase.CORDONED):
                return Cordon(node)
            case NodeTurned(node, NodePhase.READY):
                return Uncordon(node)
            case NodeAdded(node, model, gpus, _, labels):
                return AddNode(node, record_of(load_geometry(model)), gpus, labels)
            case TenantSet(tenant, quota):
                return SetTenant(tenant, quota, new=tenant not in self._desk.state.tenants)
            case TokenIssued(_, digest, role, tenant, node, note):
                return IssueToken(digest, role, tenant, node, note)
        raise _DifferentError(f"entry {row.seq}: nobody is known to have asked for {_tell([row])}")


def _creation(call: Call) -> Command:
    if call.kind is Kind.CREATE:
        return Create(call.tenant, _terms(msgspec.json.decode(call.body, type=AllocationBody)))
    every = msgspec.json.decode(call.body, type=BatchBody).allocations
    return CreateAll(call.tenant, tuple(map(_terms, every)))


def _moves(call: Call) -> Command:
    return CarryOut(
        tuple(
            MoveInstance(
                move.allocation,
                move.index,
                move.node,
                move.gpu,
                move.start,
                move.to_node,
                move.to_gpu,
                move.to_start,
            )
            for move in msgspec.json.decode(call.body, type=MovesBody).moves
        )
    )


def _terms(body: AllocationBody) -> Terms:
    if body.need is None:
        want = Want(body.profile, models=body.models)
    else:
        want = Want(None, body.need.compute, body.need.memory_gb, body.models)
    return Terms(
        want, body.count, body.priority, body.wait_seconds, body.lease_seconds, body.labels
    )


def _ids(rows: Sequence[Row]) -> Iterator[str]:
    """The ids that were given out, in order."""
    for row in rows:
        match row.entry:
            case Allocated(record) | Queued(record):
                yield record.id
            case TokenIssued(token):
                yield token
            case _:
                pass


def _tell(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row.entry!r} by {row.actor} at {row.at}" for row in rows[:3])
