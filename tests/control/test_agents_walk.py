"""Random walks: agents that fail, forget, repeat reports and report late."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.control_plane import A100, ControlPlane
from tests.control.fake_node import H200, FakeInstance, FakeNode

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
from slicewise.control.snapshot import (
    decode_snapshot,
    encode_snapshot,
    restore_snapshot,
    snapshot_of,
)
from slicewise.control.state import State
from slicewise.journal.agent_entries import Phase
from slicewise.journal.entries import Allocated, NodePhase, Part, Row, Served, Want, decode, encode
from slicewise.store.occupancy import Occupancy

PROFILES = ("1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb")


class Watch:
    """Follows the journal row by row, and checks the invariants after each row."""

    def __init__(self, control: ControlPlane, index: AllocationIndex | None = None) -> None:
        self.state = State(control.policy, index)
        self.twin = Occupancy()
        self.seen = 0
        self.failed: set[str] = set()

    def look(self, control: ControlPlane) -> list[Row]:
        rows = control.rows[self.seen :]
        self.seen = len(control.rows)
        for row in rows:
            row = msgspec.structs.replace(row, entry=decode(encode(row.entry)))
            for part in _placed(row):
                gpu = self.state.nodes[part.node].gpus[part.gpu]
                assert gpu in self.state.cluster.schedulable, "placed on a GPU that is held"
            assert self.twin.take(row.entry) == []
            self.state.apply(row)
        return rows


def _placed(row: Row) -> Iterator[Part]:
    """Yield the instances that the scheduler placed; adopted ones existed before."""
    if isinstance(row.entry, Served):
        yield from row.entry.parts
    elif isinstance(row.entry, Allocated):
        yield from (part for part in row.entry.allocation.parts if part.phase is not Phase.ACTIVE)


def check_counters(state: State, twin: Occupancy) -> None:
    """Compare all counters of the state with a recount."""
    used = {identity: [0, 0, 0] for identity in state.tenants}
    for record in state.allocations.values():
        assert all(part.phase not in (Phase.RELEASING, Phase.QUARANTINED) for part in record.parts)
        for part in record.parts:
            sums = used[record.tenant.id]
            sums[:] = sums[0] + part.size, sums[1] + part.compute, sums[2] + 1
    for identity, tenant in state.tenants.items():
        usage = tenant.usage
        assert used[identity] == [usage.memory_slices, usage.compute_slices, usage.instances]
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


def covered(state: State, fake: FakeNode, thing: FakeInstance) -> bool:
    """Return whether the scheduler cannot place anything on the slices of an instance."""
    node = state.nodes[fake.name]
    assert node.agent is not None
    gpu = node.gpus[node.agent.gpus.index(thing.gpu)]
    window = H200.profile(thing.profile).window(thing.start)
    return window & state.cluster.state(gpu).mask == window or gpu not in state.cluster.schedulable


def check_own_instances(state: State, nodes: list[FakeNode]) -> None:
    """Check that no slices of an instance that an agent created are free."""
    for fake in nodes:
        node = state.nodes.get(fake.name)
        if node is None or node.agent is None or node.agent.session != fake.session:
            continue
        for thing in fake.instances:
            owner = fake.record.get(thing.place)
            if owner is not None and thing.gpu in node.agent.gpus:
                assert covered(state, fake, thing), (owner, thing)


def check_foreign_instances(state: State, nodes: list[FakeNode]) -> None:
    """Check that foreign instances that existed before the session block their slices."""
    for fake in nodes:
        node = state.nodes.get(fake.name)
        if node is None or node.agent is None or node.agent.session != fake.session:
            continue
        for thing in fake.instances:
            if thing.uuid in fake.met and thing.gpu in node.agent.gpus:
                assert covered(state, fake, thing), thing


def command(rng: random.Random, control: ControlPlane, nodes: list[FakeNode]) -> Command:
    """Return a random command of a tenant or an operator."""
    state = control.state
    living = list(state.allocations)
    fake = rng.choice(nodes)
    node = state.nodes.get(fake.name)
    strangers = list(node.agent.foreign) if node is not None and node.agent is not None else []
    kind = rng.random()
    if kind < 0.4:
        want = Want(profile=rng.choice(PROFILES))
        wait, lease = rng.choice([0, 0, 20]), rng.choice([None, None, 30])
        return Create("acme", Terms(want, rng.choice([1, 1, 2]), wait=wait, lease=lease))
    if kind < 0.7:
        return Release(rng.choice(living) if living else "a-none")
    if kind < 0.75:
        return Adopt(fake.name, rng.choice(strangers) if strangers else "MIG-none", "acme")
    if kind < 0.8:
        return Evict(fake.name, rng.choice(strangers) if strangers else "MIG-none")
    if kind < 0.86:
        return Lost(fake.name, fake.session, 1000.0) if rng.random() < 0.5 else Heard(fake.name)
    if kind < 0.9:
        placed = [(a.id, p) for a in state.allocations.values() for p in a.parts[:1]]
        if placed:
            identity, part = rng.choice(placed)
            at = part.node, part.gpu, part.start
            return CarryOut((MoveInstance(identity, 0, *at, fake.name, 0, rng.randrange(8)),))
    if rng.random() < 0.85:
        usual: list[Command] = [Cordon(fake.name), Drain(fake.name)]
        return rng.choice(usual + [Uncordon(fake.name)] * 4)
    drastic: list[Command] = [
        Drain(fake.name, evict=True),
        RemoveNode(fake.name),
        RemoveNode(fake.name),
        AddNode(fake.name, A100, 1),
    ]
    return rng.choice(drastic)


def agent_step(rng: random.Random, control: ControlPlane, fake: FakeNode) -> None:
    """Make a random step of an agent, or of another program on its node."""
    what = rng.randrange(20)
    if what < 6:
        fake.listen(control)
    elif what < 10:
        fake.work(faults=0.3)
    elif what < 14:
        fake.tell(control, fake.report())
    elif what == 14 and fake.said:
        late = rng.choice(fake.said)
        before = len(control.rows)
        status = fake.tell(control, late)
        if late.session != fake.session and fake.session:
            assert status == 409
            brought = [row for row in control.rows[before:] if row.actor == "tester"]
            assert not brought, "what an old session says changes nothing"
    elif what == 15:
        fake.hello(control, fail=rng.random() < 0.3)
    elif what == 16:
        for thing in fake.instances:
            thing.busy = rng.random() < 0.3
        fake.create_foreign()
    elif what == 17:
        fake.destroy_foreign()
        gpu = rng.choice(fake.gpus)
        for trouble in (fake.off, fake.sick, fake.removed):
            if gpu in trouble:
                trouble.remove(gpu)
            elif rng.random() < 0.1:
                trouble.add(gpu)
    elif what == 18 and rng.random() < 0.5:
        fake.reboot()
        fake.hello(control, fail=rng.random() < 0.5)
    elif rng.random() < 0.3:
        fake.record.clear()  # the agent's folder was lost
        fake.heard = None


@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 250))
@settings(max_examples=35, deadline=None)
def test_the_state_is_consistent_whatever_agents_do(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    control = ControlPlane()
    control.tenant("acme")
    control.node("plain", 1, A100)
    nodes = [FakeNode("b0", ["GPU-a", "GPU-b"], rng), FakeNode("b1", ["GPU-c"], rng)]
    for fake in nodes:
        fake.hello(control)
    watch = Watch(control)
    for _ in range(steps):
        control.now += rng.choice([0, 1, 5])
        if rng.random() < 0.4:
            control.ask(command(rng, control, nodes))
        else:
            agent_step(rng, control, rng.choice(nodes))
        watch.look(control)
        check_counters(control.state, watch.twin)
        check_own_instances(control.state, nodes)
        check_foreign_instances(control.state, nodes)

    # Read from the journal, and from a snapshot, through the encoded form.
    snapshot = snapshot_of(control.state)
    assert snapshot_of(watch.state) == snapshot
    restored = restore_snapshot(decode_snapshot(encode_snapshot(snapshot)), control.fresh())
    assert snapshot_of(restored) == snapshot
    twin = Occupancy()
    assert twin.begin_at(snapshot) == []
    check_counters(restored, twin)
    assert twin.leaving == watch.twin.leaving

    # All three decide the same.
    planes = [
        ControlPlane(state=state, first_id=10_000)
        for state in (control.state, watch.state, restored)
    ]
    for step in range(40):
        fake = rng.choice(nodes)
        report = fake.report() if rng.random() < 0.5 else None
        asked = command(rng, planes[0], nodes)
        answers = []
        for one in planes:
            one.now = control.now + step
            answers.append(one.ask(asked) if report is None else fake.tell(one, report))
        assert answers[0] == answers[1] == answers[2]
    assert planes[0].rows == planes[1].rows == planes[2].rows


@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 150))
@settings(max_examples=25, deadline=None)
def test_the_hardware_converges_to_the_desired_state(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    control = ControlPlane()
    control.tenant("acme")
    nodes = [FakeNode("b0", ["GPU-a", "GPU-b"], rng), FakeNode("b1", ["GPU-c"], rng)]
    for fake in nodes:
        fake.hello(control)
    strangers: set[str] = set()
    for _ in range(steps):
        control.now += 1
        if rng.random() < 0.4:
            asked = command(rng, control, nodes)
            if not isinstance(asked, RemoveNode | AddNode | Evict | Adopt):
                control.ask(asked)
        else:
            agent_step(rng, control, rng.choice(nodes))

    # All faults end, every agent begins a new session, and no commands arrive.
    for fake in nodes:
        for trouble in (fake.off, fake.sick, fake.removed):
            trouble.clear()
        for thing in fake.instances:
            thing.busy = False
        assert fake.hello(control) == 200
        strangers |= {t.uuid for t in fake.instances if t.foreign}
    for _ in range(12):
        for fake in nodes:
            fake.listen(control)
            fake.work(faults=0)
            fake.tell(control, fake.report())

    state = control.state
    assert not state.leaving
    for fake in nodes:
        node = state.nodes[fake.name]
        assert node.agent is not None
        expected: dict[tuple[str, str, int], str] = {}
        for identity, index in state.on_node(node):
            part = state.allocations[identity].parts[index]
            assert part.phase is Phase.ACTIVE
            expected[part.gpu_uuid, part.profile, part.start] = part.uuid
        own = {t.place: t.uuid for t in fake.instances if t.uuid in expected.values()}
        assert own == expected
        for thing in fake.instances:
            assert covered(state, fake, thing)
            if thing.uuid not in expected.values():
                assert thing.uuid in node.agent.foreign
        assert not node.holds
        assert all(set(holds) == {"foreign"} for holds in node.agent.gpu_holds.values())
    left = {thing.uuid for fake in nodes for thing in fake.instances}
    assert strangers <= left, "a stranger was destroyed"
