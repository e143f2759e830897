"""Replays the requests of a journal on a fresh scheduler, which must make the same decisions.

The rows of one batch have the same time. In each batch the clock comes first, then the commands,
then the queue, as in the commit loop. Commands are built from the requests, not from the decisions,
so every placement, every rejection and every step of the queue is decided again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec
from tests.e2e.call_log import Call, Kind

from slicewise import load_geometry
from slicewise.api.allocations import AllocationBody, BatchBody
from slicewise.api.defrag import MovesBody
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
from slicewise.control.geometries import record_of
from slicewise.control.handler import CommandHandler
from slicewise.control.state import State
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import (
    Allocated,
    Ended,
    ModelEntered,
    Moved,
    NodeAdded,
    NodePhase,
    NodeTurned,
    Queued,
    Rejected,
    Reserved,
    Row,
    Served,
    TenantSet,
    TokenIssued,
    TurnTaken,
    Want,
)

RULES = ReservationRules(after=1.0, share=0.3)
"""The rules of the services whose decisions are replayed."""

_QUEUE = "queue"
_ON_THE_WAY = (Served, Reserved, TurnTaken, ModelEntered)
"""Entries that precede the one with the request."""


@dataclass
class ReplayResult:
    """The result of a replay."""

    problems: list[str] = field(default_factory=list)
    batches: int = 0
    refused: int = 0


class _DifferentError(Exception):
    """Raised at the first different decision; later ones cannot be compared."""


def replay_decisions(
    rows: Sequence[Row], owners: Mapping[int, Call], fresh_state: Callable[[], State]
) -> ReplayResult:
    """Replay all decisions up to the first difference."""
    again = ReplayResult()
    replayer = _Replayer(fresh_state(), owners, again)
    try:
        for _, batch in groupby(rows, key=lambda row: row.at):
            replayer.take(list(batch))
            again.batches += 1
    except _DifferentError as difference:
        again.problems.append(str(difference))
    return again


class _Replayer:
    """Replays batches with its own command handler."""

    def __init__(self, state: State, owners: Mapping[int, Call], again: ReplayResult) -> None:
        self._ids: Iterator[str] = iter(())
        self._handler = CommandHandler(
            state, lambda letter: next(self._ids, f"{letter}-refused"), rules=RULES
        )
        self._owners = owners
        self._again = again

    def take(self, batch: list[Row]) -> None:
        """Replay one batch as the commit loop does."""
        at = batch[0].at
        self._handler.expire(at)
        rest = self._compare(batch)
        while rest and rest[0].actor != _QUEUE:
            rest = self._command(rest)
        self._handler.serve_queue(at)
        rest = self._compare(rest)
        if rest:
            raise _DifferentError(f"entry {rest[0].seq}: the replay lacks {_describe(rest)}")

    def _compare(self, expected: list[Row]) -> list[Row]:
        """Compare decisions with the expected rows; return the remaining rows."""
        rows = self._handler.take_rows()
        for row, other in zip(rows, expected, strict=False):
            if row != other:
                raise _DifferentError(
                    f"entry {other.seq}: the replay differs: {_describe([row])} "
                    f"instead of {_describe([other])}"
                )
        if len(rows) > len(expected):
            missing = rows[len(expected) :]
            raise _DifferentError(f"entry {missing[0].seq}: the replay adds {_describe(missing)}")
        return expected[len(rows) :]

    def _command(self, rest: list[Row]) -> list[Row]:
        """Replay the next command of a batch."""
        head = next(
            (
                row
                for row in rest
                if row.actor == rest[0].actor and not isinstance(row.entry, _ON_THE_WAY)
            ),
            None,
        )
        if head is None:
            raise _DifferentError(f"entry {rest[0].seq}: belongs to no request")
        call = self._owners.get(head.seq)
        command = self._made_again(head, call)
        self._ids = iter(_ids(rest))
        answer = self._handler.decide(command, internal(head.actor, head.origin), head.at)
        after = self._compare(rest)
        if len(after) == len(rest):
            raise _DifferentError(
                f"entry {head.seq}: the replay writes nothing and answers {answer}"
            )
        if call is not None and call.known and call.status != 503:
            self._compare_answers(head, call, answer)
        return after

    def _compare_answers(self, row: Row, call: Call, answer: Answer) -> None:
        if call.kind is Kind.CORDON and call.sent > 1:
            return  # the first attempt changed the node, a later one was answered
        if (call.status, call.answer) != answer:
            self._again.problems.append(
                f"entry {row.seq}: call {call.key} got {call.status} {call.answer!r}, but "
                f"the replay gives {answer.status} {answer.body!r}"
            )
        elif call.status == 409:
            self._again.refused += 1

    def _made_again(self, row: Row, call: Call | None) -> Command:
        match row.entry:
            case Allocated() | Queued() | Rejected() if call is not None:
                return _creation(call)
            case Ended(record) if call is not None:
                return Release(record.id, self._handler.state.tenants_by_name[call.tenant].ref)
            case Moved() if call is not None:
                return _moves(call)
            case NodeTurned(node, NodePhase.CORDONED):
                return Cordon(node)
            case NodeTurned(node, NodePhase.READY):
                return Uncordon(node)
            case NodeAdded(node, model, gpus, _, labels):
                return AddNode(node, record_of(load_geometry(model)), gpus, labels)
            case TenantSet(tenant, quota):
                known = tenant.id in self._handler.state.tenants
                return SetTenant(tenant.name, quota, new=not known)
            case TokenIssued(_, digest, role, tenant, node, note):
                name = None if tenant is None else tenant.name
                return IssueToken(digest, role, name, node, note)
        raise _DifferentError(f"entry {row.seq}: no known request for {_describe([row])}")


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
        want,
        body.count,
        body.priority,
        body.wait_seconds,
        body.lease_seconds,
        body.labels,
        body.preemptible,
        body.expected_seconds,
    )


def _ids(rows: Sequence[Row]) -> Iterator[str]:
    """Return the ids that were assigned, in order."""
    for row in rows:
        match row.entry:
            case Allocated(record) | Queued(record):
                yield record.id
            case TokenIssued(token):
                yield token
            case _:
                pass


def _describe(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row.entry!r} by {row.actor} at {row.at}" for row in rows[:3])
