"""The history checker accepts a correct history, and detects every injected fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest
from tests.e2e.call_log import Call, Kind
from tests.e2e.conftest import Tell
from tests.e2e.history_checker import Verdict, check
from tests.e2e.load import Operator
from tests.e2e.scenario import SETTINGS, Scenario, journal, run_clients
from tests.e2e.server import Server

from slicewise.control.state import State
from slicewise.journal.entries import (
    Allocated,
    Cause,
    Ended,
    Moved,
    NodeTurned,
    Part,
    Queued,
    Rejected,
    Row,
    Served,
)

ANSWERS = 900
MORE = 30
KINDS = {Allocated, Queued, Served, Rejected, Ended, NodeTurned, Moved}
ENDS = {Cause.RELEASED, Cause.LEASE, Cause.TIMEOUT}
E = TypeVar("E")


class Scene(NamedTuple):
    """The journal and the calls of a history; each test gets a copy to modify."""

    rows: list[Row]
    calls: list[Call]
    staff: set[str]
    fresh_state: Callable[[], State]

    def check(self) -> Verdict:
        """Run the checker."""
        return check(self.rows, self.calls, self.fresh_state, self.staff)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A history of clients and an operator without failures."""
    folder: Path = tmp_path_factory.mktemp("calm")
    server = Server(folder, settings=SETTINGS)
    scenario = Scenario(7, servers=[server], operated=True)
    try:
        server.start()
        scenario.set_up(server)
        scenario.add_clients(server)
        asyncio.run(_run(scenario, server))
        assert not scenario.call_log.unexpected
        yield Scene(journal(server), scenario.call_log.calls, scenario.staff, scenario.fresh_state)
    finally:
        server.kill()


async def _run(scenario: Scenario, server: Server) -> None:
    """Run until every kind of entry has occurred."""
    [operator] = [client for client in scenario.members if isinstance(client, Operator)]
    more = ANSWERS
    for _ in range(MORE):
        halt = asyncio.Event()
        running = asyncio.create_task(run_clients(scenario, halt))
        await scenario.call_log.wait_for_answers(scenario.call_log.answers + more)
        halt.set()
        await running
        await operator.defragment()  # without concurrent clients its plans are rarely stale
        kinds, ends = _variety(await asyncio.to_thread(journal, server))
        if kinds >= KINDS and ends >= ENDS:
            break
        more = ANSWERS // 3
    operator.close()


def _variety(rows: list[Row]) -> tuple[set[type], set[Cause | None]]:
    return {type(row.entry) for row in rows}, {
        row.entry.allocation.cause for row in rows if isinstance(row.entry, Ended)
    }


@pytest.fixture
def scene(calm: Scene) -> Scene:
    """A copy of the history to modify."""
    return calm._replace(rows=list(calm.rows), calls=[copy(call) for call in calm.calls])


def test_a_correct_history_is_accepted(calm: Scene, tell: Tell) -> None:
    verdict = calm.check()
    tell(f"calm: {verdict}")
    assert verdict.clean, verdict.problems[:10]
    assert verdict.written + verdict.reads > 0.8 * len(calm.calls)
    assert verdict.refused > 50
    assert verdict.reads > 20
    assert verdict.batches > 20
    kinds, ends = _variety(calm.rows)
    assert kinds >= KINDS
    assert ends == ENDS


def test_unanswered_calls_may_or_may_not_have_taken_effect(scene: Scene) -> None:
    last = {call.actor: call for call in scene.calls}
    for call in last.values():
        call.answered = None
    assert scene.check().clean
    # A call that did not take effect at all is also consistent.
    never = next(c for c in last.values() if c.kind is Kind.CREATE)
    scene.calls.append(copy(never))
    scene.calls[-1].actor, scene.calls[-1].key = "unknown", "never"
    scene.calls[-1].body = never.body.replace(never.key.encode(), b"never")
    assert scene.check().clean


# The faults. Each returns the problem that the checker must report.

Fault = Callable[[Scene], str]


def lost_allocation(scene: Scene) -> str:
    """An allocation was answered but is not in the journal."""
    row, call = _placed_allocation(scene)
    _forget(scene, row)
    return f"of call {call.key} was answered 201 but is lost"


def lost_release(scene: Scene) -> str:
    """A release was answered but is not in the journal."""
    row = _last(scene, Ended, lambda entry: entry.allocation.cause is Cause.RELEASED)
    scene.rows.remove(row)
    _renumber(scene)
    return f"the release of {row.entry.allocation.id} by call"


def doubled_allocation(scene: Scene) -> str:
    """A call took effect twice."""
    row, call = _placed_allocation(scene)
    twin = msgspec.structs.replace(row.entry.allocation, id="atwin")
    _insert(scene, row, Allocated(twin))
    return f"allocation atwin is the second one of call {call.key}"


def doubled_unanswered_call(scene: Scene) -> str:
    """An unanswered call took effect twice."""
    row, call = _placed_allocation(scene)
    call.answered = None
    twin = msgspec.structs.replace(row.entry.allocation, id="atwin")
    _insert(scene, row, Allocated(twin))
    return f"allocation atwin is the second one of call {call.key}"


def ghost(scene: Scene) -> str:
    """The journal has an allocation without a call."""
    row, _ = _placed_allocation(scene)
    made_up = msgspec.structs.replace(row.entry.allocation, id="aghost", labels={"call": "boo"})
    _insert(scene, row, Allocated(made_up))
    return "no call requested allocation aghost"


def overlap(scene: Scene) -> str:
    """Two allocations hold the same slices."""
    one, _ = _placed_allocation(scene)
    other: Any = next(
        row
        for row in scene.rows[one.seq :]
        if isinstance(row.entry, Allocated) and row.entry.allocation.count == 1
    )
    parts = one.entry.allocation.parts
    _replace(scene, other, _with_parts(other, parts))
    return f"{other.entry.allocation.id} overlaps {one.entry.allocation.id} on slice"


def overlap_in_answers(scene: Scene) -> str:
    """Two clients got the same placement, although the journal is correct."""
    _, one = _placed_allocation(scene)
    other = next(
        call
        for call in scene.calls
        if call.kind is Kind.CREATE
        and call.status == 201
        and call.answered is not None
        and one.answered is not None
        and call.answered > one.answered
        and call.decoded()["ends_at"] is None
    )
    for call in scene.calls:  # neither is ever released
        if call.subject in (one.decoded()["id"], other.decoded()["id"]):
            call.kind = Kind.GET
    other.answer = msgspec.json.encode(other.decoded() | {"instances": one.decoded()["instances"]})
    return f"by their answers, {one.decoded()['id']} and {other.decoded()['id']} both held"


def reordered_answer(scene: Scene) -> str:
    """A call was answered before another was made, but is later in the journal."""
    _, call = _placed_allocation(scene)
    call.invoked, call.answered = -2, -1
    return f"call {call.key} was answered before call"


def another_placement(scene: Scene) -> str:
    """The answer has another placement than the journal."""
    _, call = _placed_allocation(scene)
    content = call.decoded()
    content["instances"][0]["gpu"] += 1
    call.answer = msgspec.json.encode(content)
    return f"call {call.key} got another placement"


def another_choice(scene: Scene) -> str:
    """The placement is legal, but not the scheduler's choice."""
    row: Any = next(row for row in scene.rows if isinstance(row.entry, Allocated))
    part = row.entry.allocation.parts[0]
    moved = msgspec.structs.replace(part, gpu=(part.gpu + 1) % 2)
    _replace(scene, row, _with_parts(row, (moved, *row.entry.allocation.parts[1:])))
    return f"entry {row.seq}: the replay differs"


def needless_rejection(scene: Scene) -> str:
    """A request was rejected although there was room."""
    row, call = _placed_allocation(scene)
    record = row.entry.allocation
    detail = "no GPU has enough free"
    _forget(scene, row, keep=True)
    refusal = Rejected(record.tenant, record.want, record.count, "capacity", detail)
    _replace(scene, scene.rows[row.seq - 1], refusal)
    call.status = 409
    call.answer = msgspec.json.encode({"reason": "capacity", "detail": detail})
    return f"entry {row.seq}: the replay differs"


def rejection_with_another_reason(scene: Scene) -> str:
    """The answer has another reason than the journal."""
    call = next(call for call in scene.calls if call.status == 409 and call.kind is Kind.CREATE)
    call.answer = msgspec.json.encode(call.decoded() | {"reason": "weather"})
    return f"call {call.key} got another reason"


def unwritten_rejection(scene: Scene) -> str:
    """A rejection is not in the journal."""
    row = _last(scene, Rejected, lambda entry: True)
    scene.rows.remove(row)
    _renumber(scene)
    return "was rejected, but has no entry"


def queue_not_served(scene: Scene) -> str:
    """Slices became free, but the queue was not served."""
    row = _last(scene, Served, lambda entry: True)
    identity = row.entry.allocation
    scene.rows[:] = [
        other
        for other in scene.rows
        if other is not row
        and not (isinstance(other.entry, Ended) and other.entry.allocation.id == identity)
    ]
    _renumber(scene)
    return f"entry {row.seq}: the replay"


def expired_lease_not_ended(scene: Scene) -> str:
    """A lease has expired, but the allocation has not ended."""
    row = next(
        row
        for row in scene.rows
        if isinstance(row.entry, Ended) and row.entry.allocation.cause is Cause.LEASE
    )
    scene.rows.remove(row)
    _renumber(scene)
    return f"entry {row.seq}: the replay differs"


def release_without_call(scene: Scene) -> str:
    """An allocation was released without a call."""
    row = _last(scene, Ended, lambda entry: entry.allocation.cause is Cause.RELEASED)
    identity = row.entry.allocation.id
    scene.calls[:] = [call for call in scene.calls if call.subject != identity]
    return f"no call requested the release of {identity}"


def lost_cordon(scene: Scene) -> str:
    """A cordon was answered but is not in the journal."""
    row = _last(scene, NodeTurned, lambda entry: True)
    scene.rows.remove(row)
    _renumber(scene)
    return f"but no entry changes the phase of {row.entry.node}"


def lost_move(scene: Scene) -> str:
    """Moves were answered but are not in the journal."""
    row = _last(scene, Moved, lambda entry: True)
    scene.rows.remove(row)
    _renumber(scene)
    return f"was answered, but {{'allocation': '{row.entry.allocation}'"


def move_elsewhere(scene: Scene) -> str:
    """An instance was moved to a placement that was not requested."""
    row = _last(scene, Moved, lambda entry: True)
    part = msgspec.structs.replace(row.entry.part, gpu=row.entry.part.gpu + 1)
    _replace(scene, row, msgspec.structs.replace(row.entry, part=part))
    return f"entry {row.seq}: no call requested the move of"


def stale_read(scene: Scene) -> str:
    """A read returned a state older than an earlier answer."""
    call = [call for call in scene.calls if call.kind is Kind.CLUSTER][-1]
    old = next(call for call in scene.calls if call.kind is Kind.CLUSTER)
    call.answer = old.answer
    return f"but saw entry {old.decoded()['seq']}"


def read_ahead(scene: Scene) -> str:
    """A read returned effects of a later call."""
    old = next(call for call in scene.calls if call.kind is Kind.CLUSTER)
    call = [call for call in scene.calls if call.kind is Kind.CLUSTER][-1]
    old.answer = call.answer
    return f"but saw entry {call.decoded()['seq']}"


def wrong_read(scene: Scene) -> str:
    """A read of the cluster counted one instance too many."""
    call = next(call for call in scene.calls if call.kind is Kind.CLUSTER)
    call.answer = msgspec.json.encode(
        call.decoded() | {"instances": call.decoded()["instances"] + 1}
    )
    return f"for entry {call.decoded()['seq']}, which was"


def wrong_allocation_state(scene: Scene) -> str:
    """A read of an allocation returned a state that it never had."""
    call = next(call for call in scene.calls if call.kind is Kind.GET)
    call.answer = msgspec.json.encode(call.decoded() | {"state": "lost"})
    return f"got state lost of {call.subject}"


def gap(scene: Scene) -> str:
    """An entry is missing."""
    del scene.rows[100]
    return "the journal has entry 102 instead of 101"


FAULTS: tuple[Fault, ...] = (
    lost_allocation,
    lost_release,
    doubled_allocation,
    doubled_unanswered_call,
    ghost,
    overlap,
    overlap_in_answers,
    reordered_answer,
    another_placement,
    another_choice,
    needless_rejection,
    rejection_with_another_reason,
    unwritten_rejection,
    queue_not_served,
    expired_lease_not_ended,
    release_without_call,
    lost_cordon,
    lost_move,
    move_elsewhere,
    stale_read,
    read_ahead,
    wrong_read,
    wrong_allocation_state,
    gap,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_injected_faults_are_detected(fault: Fault, scene: Scene) -> None:
    expected = fault(scene)
    problems = scene.check().problems
    assert any(expected in complaint for complaint in problems), (expected, problems[:10])


# Helpers of the faults


def _placed_allocation(scene: Scene) -> tuple[Any, Call]:
    """Return a placed allocation of one instance, without a lease, and its call.

    The client had no rejection before, so one can be injected.
    """
    calls = {call.key: call for call in scene.calls}
    refused: set[str] = set()
    for row in scene.rows[40:]:
        if isinstance(row.entry, Rejected):
            refused.add(row.actor)
        if isinstance(row.entry, Allocated) and row.actor not in refused:
            record = row.entry.allocation
            call = calls.get(record.labels["call"])
            if call is not None and record.count == 1 and record.lease is None:
                return row, call
    raise AssertionError("no such allocation")


def _last(scene: Scene, kind: type[E], fits: Callable[[E], bool]) -> Any:
    return [row for row in scene.rows if isinstance(row.entry, kind) and fits(row.entry)][-1]


def _forget(scene: Scene, row: Any, keep: bool = False) -> None:
    """Remove an allocation from the journal; with ``keep``, except for the row that created it."""
    identity = row.entry.allocation.id
    scene.rows[:] = [
        other
        for other in scene.rows
        if (keep and other is row) or identity not in msgspec.json.encode(other.entry).decode()
    ]
    _renumber(scene)


def _insert(scene: Scene, after: Row, entry: Allocated) -> None:
    scene.rows.insert(after.seq, Row(0, after.at, after.actor, entry))
    _renumber(scene)


def _replace(scene: Scene, row: Row, entry: Any) -> None:
    scene.rows[row.seq - 1] = msgspec.structs.replace(row, entry=entry)


def _with_parts(row: Any, parts: tuple[Part, ...]) -> Allocated:
    return Allocated(msgspec.structs.replace(row.entry.allocation, parts=parts))


def _renumber(scene: Scene) -> None:
    scene.rows[:] = [
        msgspec.structs.replace(row, seq=number) for number, row in enumerate(scene.rows, 1)
    ]
