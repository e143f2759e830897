"""Agents that fail, forget, repeat themselves and come late: the books stay true at every step."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.box import H200, Box, Thing
from tests.control.office import A100, Office

from slicewise.control.allocation_index import AllocationIndex
from slicewise.control.commands import (
    AddNode,
    Adopt,
    CarryOut,
    Command,
    Cordon,
    Create,
    Drain,
    Evict,
    Heard,
    Lost,
    MoveInstance,
    Release,
    RemoveNode,
    Terms,
    Uncordon,
)
from slicewise.control.entries import Allocated, NodePhase, Part, Row, Served, Want, decode, encode
from slicewise.control.hardware import Phase
from slicewise.control.image import decode as decode_image
from slicewise.control.image import encode as encode_image
from slicewise.control.image import image_of, restore
from slicewise.control.state import State
from slicewise.store.occupancy import Occupancy

PROFILES = ("1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb")


class Watch:
    """Follows the journal row by row, and checks what must hold of every single one."""

    def __init__(self, office: Office, index: AllocationIndex | None = None) -> None:
        self.state = State(office.policy, office.discipline, index)
        self.twin = Occupancy()
        self.seen = 0
        self.failed: set[str] = set()

    def look(self, office: Office) -> list[Row]:
        rows = office.rows[self.seen :]
        self.seen = len(office.rows)
        for row in rows:
            row = msgspec.structs.replace(row, entry=decode(encode(row.entry)))
            for part in _placed(row):
                gpu = self.state.nodes[part.node].gpus[part.gpu]
                assert gpu in self.state.cluster.schedulable, "placed on a GPU that is held"
            assert self.twin.take(row.entry) == []
            self.state.apply(row)
        return rows


def _placed(row: Row) -> Iterator[Part]:
    """Instances that the scheduler placed; one that was adopted was there already."""
    if isinstance(row.entry, Served):
        yield from row.entry.parts
    elif isinstance(row.entry, Allocated):
        yield from (part for part in row.entry.allocation.parts if part.phase is not Phase.ACTIVE)


def books(state: State, twin: Occupancy) -> None:
    """Everything the state keeps, held against what can be counted."""
    used = {name: [0, 0, 0] for name in state.tenants}
    for record in state.allocations.values():
        assert all(part.phase not in (Phase.RELEASING, Phase.QUARANTINED) for part in record.parts)
        for part in record.parts:
            sums = used[record.tenant]
            sums[:] = sums[0] + part.size, sums[1] + part.compute, sums[2] + 1
    for name, tenant in state.tenants.items():
        usage = tenant.usage
        assert used[name] == [usage.memory_slices, usage.compute_slices, usage.instances]
    for record in state.leaving.values():
        assert record.ended is not None
        assert any(part.phase not in (None, Phase.GONE) for part in record.parts)
    assert twin.instances == state.cluster.instance_count
    assert twin.instances_by_node() == {n.name: n.instances for n in state.nodes.values()}
    for node in state.nodes.values():
        ready = node.phase is NodePhase.READY and not node.holds
        for index, gpu in enumerate(node.gpus):
            held = node.agent is not None and index in node.agent.gpu_holds
            assert (gpu in state.cluster.schedulable) == (ready and not held)


def covered(state: State, box: Box, thing: Thing) -> bool:
    """Whether the scheduler leaves the slices of an instance alone."""
    node = state.nodes[box.name]
    assert node.agent is not None
    gpu = node.gpus[node.agent.gpus.index(thing.gpu)]
    window = H200.profile(thing.profile).window(thing.start)
    return window & state.cluster.state(gpu).mask == window or gpu not in state.cluster.schedulable


def own_are_covered(state: State, boxes: list[Box]) -> None:
    """What an agent made, and knows it made, is never given to somebody else."""
    for box in boxes:
        node = state.nodes.get(box.name)
        if node is None or node.agent is None or node.agent.session != box.session:
            continue
        for thing in box.things:
            owner = box.record.get(thing.place)
            if owner is not None and thing.gpu in node.agent.gpus:
                assert covered(state, box, thing), (owner, thing)


def strangers_are_covered(state: State, boxes: list[Box]) -> None:
    """What somebody else had made before an agent's session began is in nobody's way, ever."""
    for box in boxes:
        node = state.nodes.get(box.name)
        if node is None or node.agent is None or node.agent.session != box.session:
            continue
        for thing in box.things:
            if thing.uuid in box.met and thing.gpu in node.agent.gpus:
                assert covered(state, box, thing), thing


def command(rng: random.Random, office: Office, boxes: list[Box]) -> Command:
    """Something that a tenant or an operator may ask for."""
    state = office.state
    living = list(state.allocations)
    box = rng.choice(boxes)
    node = state.nodes.get(box.name)
    strangers = list(node.agent.foreign) if node is not None and node.agent is not None else []
    kind = rng.random()
    if kind < 0.4:
        want = Want(profile=rng.choice(PROFILES))
        wait, lease = rng.choice([0, 0, 20]), rng.choice([None, None, 30])
        return Create("acme", Terms(want, rng.choice([1, 1, 2]), wait=wait, lease=lease))
    if kind < 0.7:
        return Release(rng.choice(living) if living else "a-none")
    if kind < 0.75:
        return Adopt(box.name, rng.choice(strangers) if strangers else "MIG-none", "acme")
    if kind < 0.8:
        return Evict(box.name, rng.choice(strangers) if strangers else "MIG-none")
    if kind < 0.86:
        return Lost(box.name, box.session, 1000.0) if rng.random() < 0.5 else Heard(box.name)
    if kind < 0.9:
        placed = [(a.id, p) for a in state.allocations.values() for p in a.parts[:1]]
        if placed:
            identity, part = rng.choice(placed)
            at = part.node, part.gpu, part.start
            return CarryOut((MoveInstance(identity, 0, *at, box.name, 0, rng.randrange(8)),))
    if rng.random() < 0.85:
        usual: list[Command] = [Cordon(box.name), Drain(box.name)]
        return rng.choice(usual + [Uncordon(box.name)] * 4)
    drastic: list[Command] = [
        Drain(box.name, evict=True),
        RemoveNode(box.name),
        RemoveNode(box.name),
        AddNode(box.name, A100, 1),
    ]
    return rng.choice(drastic)


def agent_step(rng: random.Random, office: Office, box: Box) -> None:
    """Something that an agent, or somebody else on its node, may do."""
    what = rng.randrange(20)
    if what < 6:
        box.listen(office)
    elif what < 10:
        box.work(faults=0.3)
    elif what < 14:
        box.tell(office, box.report())
    elif what == 14 and box.said:
        late = rng.choice(box.said)
        before = len(office.rows)
        status = box.tell(office, late)
        if late.session != box.session and box.session:
            assert status == 409
            brought = [row for row in office.rows[before:] if row.actor == "tester"]
            assert not brought, "what an old session says changes nothing"
    elif what == 15:
        box.hello(office, fail=rng.random() < 0.3)
    elif what == 16:
        for thing in box.things:
            thing.busy = rng.random() < 0.3
        box.somebody_creates()
    elif what == 17:
        box.somebody_destroys()
        gpu = rng.choice(box.gpus)
        for trouble in (box.off, box.sick, box.removed):
            if gpu in trouble:
                trouble.remove(gpu)
            elif rng.random() < 0.1:
                trouble.add(gpu)
    elif what == 18 and rng.random() < 0.5:
        box.reboot()
        box.hello(office, fail=rng.random() < 0.5)
    elif rng.random() < 0.3:
        box.record.clear()  # the agent's folder was lost
        box.heard = None


@pytest.mark.unmeasured
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 250))
@settings(max_examples=35, deadline=None)
def test_whatever_agents_do_the_books_are_true(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    office = Office()
    office.tenant("acme")
    office.node("plain", 1, A100)
    boxes = [Box("b0", ["GPU-a", "GPU-b"], rng), Box("b1", ["GPU-c"], rng)]
    for box in boxes:
        box.hello(office)
    watch = Watch(office)
    for _ in range(steps):
        office.now += rng.choice([0, 1, 5])
        if rng.random() < 0.4:
            office.ask(command(rng, office, boxes))
        else:
            agent_step(rng, office, rng.choice(boxes))
        watch.look(office)
        books(office.state, watch.twin)
        own_are_covered(office.state, boxes)
        strangers_are_covered(office.state, boxes)

    # Read from the journal, and from an image, by way of what is really written.
    image = image_of(office.state)
    assert image_of(watch.state) == image
    restored = restore(decode_image(encode_image(image)), office.fresh())
    assert image_of(restored) == image
    twin = Occupancy()
    assert twin.begin_at(image) == []
    books(restored, twin)
    assert twin.leaving == watch.twin.leaving

    # From here on all three decide alike.
    offices = [
        Office(state=state, first_id=10_000) for state in (office.state, watch.state, restored)
    ]
    for step in range(40):
        box = rng.choice(boxes)
        report = box.report() if rng.random() < 0.5 else None
        asked = command(rng, offices[0], boxes)
        answers = []
        for one in offices:
            one.now = office.now + step
            answers.append(one.ask(asked) if report is None else box.tell(one, report))
        assert answers[0] == answers[1] == answers[2]
    assert offices[0].rows == offices[1].rows == offices[2].rows


@pytest.mark.unmeasured
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 150))
@settings(max_examples=25, deadline=None)
def test_in_the_end_the_hardware_is_what_was_decided(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    office = Office()
    office.tenant("acme")
    boxes = [Box("b0", ["GPU-a", "GPU-b"], rng), Box("b1", ["GPU-c"], rng)]
    for box in boxes:
        box.hello(office)
    strangers: set[str] = set()
    for _ in range(steps):
        office.now += 1
        if rng.random() < 0.4:
            asked = command(rng, office, boxes)
            if not isinstance(asked, RemoveNode | AddNode | Evict | Adopt):
                office.ask(asked)
        else:
            agent_step(rng, office, rng.choice(boxes))

    # The trouble is over: every agent starts anew, and nobody but the agents does anything.
    for box in boxes:
        for trouble in (box.off, box.sick, box.removed):
            trouble.clear()
        for thing in box.things:
            thing.busy = False
        assert box.hello(office) == 200
        strangers |= {t.uuid for t in box.things if t.strange}
    for _ in range(12):
        for box in boxes:
            box.listen(office)
            box.work(faults=0)
            box.tell(office, box.report())

    state = office.state
    assert not state.leaving
    for box in boxes:
        node = state.nodes[box.name]
        assert node.agent is not None
        expected: dict[tuple[str, str, int], str] = {}
        for identity, index in state.on_node(node):
            part = state.allocations[identity].parts[index]
            assert part.phase is Phase.ACTIVE
            expected[part.gpu_uuid, part.profile, part.start] = part.uuid
        own = {t.place: t.uuid for t in box.things if t.uuid in expected.values()}
        assert own == expected
        for thing in box.things:
            assert covered(state, box, thing)
            if thing.uuid not in expected.values():
                assert thing.uuid in node.agent.foreign
        assert not node.holds
        assert all(set(holds) == {"foreign"} for holds in node.agent.gpu_holds.values())
    left = {thing.uuid for box in boxes for thing in box.things}
    assert strangers <= left, "a stranger was destroyed"
