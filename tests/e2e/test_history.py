"""A history of calm: the checker has nothing to say of it, and finds whatever is planted in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest
from tests.e2e.conftest import Tell
from tests.e2e.history import Verdict, check
from tests.e2e.load import Operator
from tests.e2e.record import Call, Kind
from tests.e2e.server import Server
from tests.e2e.stage import SETTINGS, Stage, journal, perform

from slicewise.control.entries import (
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
from slicewise.control.state import State

ANSWERS = 900
MORE = 30
KINDS = {Allocated, Queued, Served, Rejected, Ended, NodeTurned, Moved}
ENDS = {Cause.RELEASED, Cause.LEASE, Cause.TIMEOUT}
E = TypeVar("E")


class Scene(NamedTuple):
    """What there is to be checked; each test has a copy it may spoil."""

    rows: list[Row]
    calls: list[Call]
    staff: set[str]
    fresh_state: Callable[[], State]

    def check(self) -> Verdict:
        """The verdict on it."""
        return check(self.rows, self.calls, self.fresh_state, self.staff)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Clients at work, an operator among them, and nothing goes wrong."""
    folder: Path = tmp_path_factory.mktemp("calm")
    server = Server(folder, settings=SETTINGS)
    stage = Stage(7, servers=[server], operated=True)
    try:
        server.start()
        stage.furnish(server)
        stage.recruit(server)
        asyncio.run(_perform(stage, server))
        assert not stage.record.surprises
        yield Scene(journal(server), stage.record.calls, stage.staff, stage.fresh_state)
    finally:
        server.kill()


async def _perform(stage: Stage, server: Server) -> None:
    """Go on until everything has happened that can."""
    [operator] = [client for client in stage.troop if isinstance(client, Operator)]
    more = ANSWERS
    for _ in range(MORE):
        halt = asyncio.Event()
        show = asyncio.create_task(perform(stage, halt))
        await stage.record.reach(stage.record.answers + more)
        halt.set()
        await show
        await operator.defragment()  # with nobody in its way what it plans is seldom too late
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
    """A copy of the history, to be spoiled."""
    return calm._replace(rows=list(calm.rows), calls=[copy(call) for call in calm.calls])


def test_a_calm_history_is_clean(calm: Scene, tell: Tell) -> None:
    verdict = calm.check()
    tell(f"calm: {verdict}")
    assert verdict.clean, verdict.complaints[:10]
    assert verdict.written + verdict.reads > 0.8 * len(calm.calls)
    assert verdict.refused > 50
    assert verdict.reads > 20
    assert verdict.batches > 20
    kinds, ends = _variety(calm.rows)
    assert kinds >= KINDS
    assert ends == ENDS


def test_calls_that_nobody_answered_may_have_happened_or_not(scene: Scene) -> None:
    last = {call.actor: call for call in scene.calls}
    for call in last.values():
        call.answered = None
    assert scene.check().clean
    # One that did not happen at all is as good.
    never = next(c for c in last.values() if c.kind is Kind.CREATE)
    scene.calls.append(copy(never))
    scene.calls[-1].actor, scene.calls[-1].key = "nobody", "never"
    scene.calls[-1].body = never.body.replace(never.key.encode(), b"never")
    assert scene.check().clean


# What is planted. Each returns what the checker has to say of it.

Plant = Callable[[Scene], str]


def lost_allocation(scene: Scene) -> str:
    """An allocation was answered, and the journal knows nothing of it."""
    row, call = _placed(scene)
    _forget(scene, row)
    return f"of call {call.key} was answered 201 and is lost"


def lost_release(scene: Scene) -> str:
    """A release was answered, and the journal knows nothing of it."""
    row = _last(scene, Ended, lambda entry: entry.allocation.cause is Cause.RELEASED)
    scene.rows.remove(row)
    _renumber(scene)
    return f"the release of {row.entry.allocation.id} by call"


def doubled_allocation(scene: Scene) -> str:
    """A call was carried out twice."""
    row, call = _placed(scene)
    twin = msgspec.structs.replace(row.entry.allocation, id="atwin")
    _insert(scene, row, Allocated(twin))
    return f"allocation atwin is a second one for call {call.key}"


def doubled_after_no_answer(scene: Scene) -> str:
    """Even a call that nobody answered happens once at most."""
    row, call = _placed(scene)
    call.answered = None
    twin = msgspec.structs.replace(row.entry.allocation, id="atwin")
    _insert(scene, row, Allocated(twin))
    return f"allocation atwin is a second one for call {call.key}"


def ghost(scene: Scene) -> str:
    """An allocation that nobody asked for."""
    row, _ = _placed(scene)
    made_up = msgspec.structs.replace(row.entry.allocation, id="aghost", labels={"call": "boo"})
    _insert(scene, row, Allocated(made_up))
    return "nobody asked for allocation aghost"


def overlap(scene: Scene) -> str:
    """Two allocations on the same slices."""
    one, _ = _placed(scene)
    other: Any = next(
        row
        for row in scene.rows[one.seq :]
        if isinstance(row.entry, Allocated) and row.entry.allocation.count == 1
    )
    parts = one.entry.allocation.parts
    _replace(scene, other, _with_parts(other, parts))
    return f"{other.entry.allocation.id} overlaps {one.entry.allocation.id} on slice"


def overlap_in_answers(scene: Scene) -> str:
    """Two clients were told the same place, whatever the journal says."""
    _, one = _placed(scene)
    other = next(
        call
        for call in scene.calls
        if call.kind is Kind.CREATE
        and call.status == 201
        and call.answered is not None
        and one.answered is not None
        and call.answered > one.answered
        and call.said()["ends_at"] is None
    )
    for call in scene.calls:  # neither is ever released
        if call.subject in (one.said()["id"], other.said()["id"]):
            call.kind = Kind.GET
    other.answer = msgspec.json.encode(other.said() | {"instances": one.said()["instances"]})
    return f"by their answers, {one.said()['id']} and {other.said()['id']} both held"


def reordered_answer(scene: Scene) -> str:
    """A call was answered before another was made, and comes after it in the journal."""
    _, call = _placed(scene)
    call.invoked, call.answered = -2, -1
    return f"call {call.key} was answered before call"


def another_place(scene: Scene) -> str:
    """The client was told another place than the one written down."""
    _, call = _placed(scene)
    said = call.said()
    said["instances"][0]["gpu"] += 1
    call.answer = msgspec.json.encode(said)
    return f"call {call.key} was told another place than this"


def another_choice(scene: Scene) -> str:
    """A legal place, but not the one that the scheduler chooses."""
    row: Any = next(row for row in scene.rows if isinstance(row.entry, Allocated))
    part = row.entry.allocation.parts[0]
    moved = msgspec.structs.replace(part, gpu=(part.gpu + 1) % 2)
    _replace(scene, row, _with_parts(row, (moved, *row.entry.allocation.parts[1:])))
    return f"entry {row.seq}: decided again it is another one"


def refusal_without_need(scene: Scene) -> str:
    """A request was refused although there was room."""
    row, call = _placed(scene)
    record = row.entry.allocation
    detail = "no GPU has enough free"
    _forget(scene, row, keep=True)
    refusal = Rejected(record.tenant, record.want, record.count, "capacity", detail)
    _replace(scene, scene.rows[row.seq - 1], refusal)
    call.status = 409
    call.answer = msgspec.json.encode({"reason": "capacity", "detail": detail})
    return f"entry {row.seq}: decided again it is another one"


def refusal_for_another_reason(scene: Scene) -> str:
    """A client was told another reason than the one written down."""
    call = next(call for call in scene.calls if call.status == 409 and call.kind is Kind.CREATE)
    call.answer = msgspec.json.encode(call.said() | {"reason": "weather"})
    return f"call {call.key} was told another reason"


def refusal_unwritten(scene: Scene) -> str:
    """A refusal that the journal does not know."""
    row = _last(scene, Rejected, lambda entry: True)
    scene.rows.remove(row)
    _renumber(scene)
    return "was refused, and no entry tells of it"


def queue_not_served(scene: Scene) -> str:
    """Room appeared, and the one who waited was left waiting."""
    row = _last(scene, Served, lambda entry: True)
    identity = row.entry.allocation
    scene.rows[:] = [
        other
        for other in scene.rows
        if other is not row
        and not (isinstance(other.entry, Ended) and other.entry.allocation.id == identity)
    ]
    _renumber(scene)
    return f"entry {row.seq}: decided again"


def lease_that_never_ends(scene: Scene) -> str:
    """A lease is over, and the allocation is still there."""
    row = next(
        row
        for row in scene.rows
        if isinstance(row.entry, Ended) and row.entry.allocation.cause is Cause.LEASE
    )
    scene.rows.remove(row)
    _renumber(scene)
    return f"entry {row.seq}: decided again it is another one"


def release_nobody_asked_for(scene: Scene) -> str:
    """An allocation was released, and no client did it."""
    row = _last(scene, Ended, lambda entry: entry.allocation.cause is Cause.RELEASED)
    identity = row.entry.allocation.id
    scene.calls[:] = [call for call in scene.calls if call.subject != identity]
    return f"nobody asked for the release of {identity}"


def turn_lost(scene: Scene) -> str:
    """A node was cordoned, and the journal does not know."""
    row = _last(scene, NodeTurned, lambda entry: True)
    scene.rows.remove(row)
    _renumber(scene)
    return f"and no entry tells that {row.entry.node} was turned"


def move_lost(scene: Scene) -> str:
    """Instances were moved, and the journal does not know."""
    row = _last(scene, Moved, lambda entry: True)
    scene.rows.remove(row)
    _renumber(scene)
    return f"was answered, and {{'allocation': '{row.entry.allocation}'"


def move_elsewhere(scene: Scene) -> str:
    """An instance was moved to where nobody wanted it."""
    row = _last(scene, Moved, lambda entry: True)
    part = msgspec.structs.replace(row.entry.part, gpu=row.entry.part.gpu + 1)
    _replace(scene, row, msgspec.structs.replace(row.entry, part=part))
    return f"entry {row.seq}: nobody asked for the move of"


def stale_read(scene: Scene) -> str:
    """A client saw less than had been answered when it asked."""
    call = [call for call in scene.calls if call.kind is Kind.CLUSTER][-1]
    old = next(call for call in scene.calls if call.kind is Kind.CLUSTER)
    call.answer = old.answer
    return f"and saw entry {old.said()['seq']}"


def read_ahead(scene: Scene) -> str:
    """A client saw what nobody had asked for yet."""
    old = next(call for call in scene.calls if call.kind is Kind.CLUSTER)
    call = [call for call in scene.calls if call.kind is Kind.CLUSTER][-1]
    old.answer = call.answer
    return f"and saw entry {call.said()['seq']}"


def wrong_read(scene: Scene) -> str:
    """A client was told of an instance more than there was."""
    call = next(call for call in scene.calls if call.kind is Kind.CLUSTER)
    call.answer = msgspec.json.encode(call.said() | {"instances": call.said()["instances"] + 1})
    return f"of entry {call.said()['seq']}, which was"


def wrong_look(scene: Scene) -> str:
    """A client was told that an allocation is what it never was."""
    call = next(call for call in scene.calls if call.kind is Kind.GET)
    call.answer = msgspec.json.encode(call.said() | {"state": "lost"})
    return f"was told that {call.subject} is lost"


def gap(scene: Scene) -> str:
    """An entry is missing."""
    del scene.rows[100]
    return "the journal has entry 102 in place of 101"


PLANTS: tuple[Plant, ...] = (
    lost_allocation,
    lost_release,
    doubled_allocation,
    doubled_after_no_answer,
    ghost,
    overlap,
    overlap_in_answers,
    reordered_answer,
    another_place,
    another_choice,
    refusal_without_need,
    refusal_for_another_reason,
    refusal_unwritten,
    queue_not_served,
    lease_that_never_ends,
    release_nobody_asked_for,
    turn_lost,
    move_lost,
    move_elsewhere,
    stale_read,
    read_ahead,
    wrong_read,
    wrong_look,
    gap,
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_planted_is_found(plant: Plant, scene: Scene) -> None:
    expected = plant(scene)
    complaints = scene.check().complaints
    assert any(expected in complaint for complaint in complaints), (expected, complaints[:10])


# How it is planted


def _placed(scene: Scene) -> tuple[Any, Call]:
    """A placed allocation of one instance, without a lease, and the call that made it.

    Its client had no refusal before, so that one can be planted.
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
    """Let the journal know nothing of an allocation; ``keep`` leaves the row that made it."""
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
