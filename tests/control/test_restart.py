"""Replaying the journal gives the same state, which makes the same decisions."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.control_plane import A30, A100, ControlPlane

from slicewise.control.commands import (
    AddNode,
    CarryOut,
    Command,
    Cordon,
    Create,
    CreateAll,
    Drain,
    Extend,
    IssueToken,
    MoveInstance,
    Release,
    RemoveNode,
    RemoveTenant,
    RevokeToken,
    SetTenant,
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
from slicewise.engine.reclaim import ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import QuotaRecord, Role, Row, Seconds, Want, decode, encode
from slicewise.journal.lease_entries import LeaseEnding

POLICIES = ("default", "round-robin", "round-robin-strict", "best-fit-strict", "peer-hami")
PROFILES = (
    "1g.10gb",
    "1g.10gb+me",
    "2g.20gb",
    "3g.40gb",
    "4g.40gb",
    "7g.80gb",
    "1g.6gb",
    "2g.12gb",
)
RULES = (ReservationRules(), ReservationRules(after=2.0, share=0.5))
RECLAIM = (ReclaimRules(), ReclaimRules(enabled=True, grace=2.0, min_run=5.0, notice=3.0))


def random_command(rng: random.Random, state: State, step: int) -> Command:
    """Return a random command, valid or not."""
    tenant = rng.choice(["acme", "acme", "beta", "gone"])
    living = list(state.allocations)
    node = rng.choice(["n0", "n1", "n2"])

    def terms() -> Terms:
        need = Want(compute=rng.randint(0, 4), memory_gb=float(rng.randint(0, 45)))
        return Terms(
            Want(profile=rng.choice(PROFILES)) if rng.random() < 0.9 else need,
            count=rng.choice([1, 1, 1, 2, 3]),
            priority=rng.randint(-1, 2),
            wait=rng.choice([0, 0, 5, 50]),
            lease=rng.choice([None, None, 3, 30]),
            preemptible=rng.random() < 0.3,
            expected_seconds=rng.choice([None, 10]),
        )

    kind = rng.random()
    if kind < 0.5:
        return Create(tenant, terms())
    if kind < 0.55:
        return CreateAll(tenant, tuple(terms() for _ in range(rng.randint(1, 3))))
    if kind < 0.65:
        return Extend(rng.choice(living) if living else "a-none", rng.choice([1, 4, 30]))
    if kind < 0.8:
        return Release(rng.choice(living) if living else "a-none")
    if kind < 0.86:
        return AddNode(node, rng.choice([A100, A30]), rng.randint(1, 2))
    if kind < 0.94:
        choices: list[Command] = [
            Cordon(node),
            Uncordon(node),
            Drain(node, evict=rng.random() < 0.3),
            RemoveNode(node),
        ]
        return rng.choice(choices)
    if kind < 0.97:
        quota = QuotaRecord(
            memory_slices=rng.choice([None, 6, 20]),
            max_priority=rng.randint(0, 1),
            weight=rng.choice([0.5, 1, 3]),
            guarantee=rng.choice([0, 6, 7]),
            default_lease_seconds=rng.choice([None, 5]),
            max_lease_seconds=rng.choice([None, 20]),
        )
        more: list[Command] = [
            SetTenant(tenant, quota, new=rng.random() < 0.5),
            RemoveTenant("beta"),
            IssueToken(f"{step:064d}", Role.TENANT, rng.choice([None, "beta"])),
            RevokeToken(rng.choice(list(state.tokens) or ["t-none"])),
        ]
        return rng.choice(more)
    placed = [a for a in state.allocations.values() if a.parts]
    if not placed:
        return Cordon("n9")
    allocation = rng.choice(placed)
    part = allocation.parts[0]
    return CarryOut(
        (
            MoveInstance(
                allocation.id,
                0,
                part.node,
                part.gpu,
                part.start,
                rng.choice(["n0", "n1"]),
                rng.randint(0, 1),
                rng.choice([0, 1, 2, 4]),
            ),
        )
    )


def _no_overlap(state: State) -> None:
    """Recount slices and usage from the allocations alone, and compare."""
    taken: set[tuple[str, int, int]] = set()
    used: dict[str, list[int]] = {identity: [0, 0, 0] for identity in state.tenants}
    for allocation in state.allocations.values():
        assert (allocation.id in state.tickets) == (not allocation.parts)
        for part in allocation.parts:
            for piece in range(part.start, part.start + part.size):
                assert (part.node, part.gpu, piece) not in taken
                taken.add((part.node, part.gpu, piece))
            sums = used[allocation.tenant.id]
            sums[:] = sums[0] + part.size, sums[1] + part.compute, sums[2] + 1
    assert len(taken) == state.cluster.occupied_slices
    for identity, tenant in state.tenants.items():
        usage = tenant.usage
        assert used[identity] == [usage.memory_slices, usage.compute_slices, usage.instances]
        assert tenant.waiting == sum(identity in state.tickets for identity in tenant.allocations)
    assert sorted(state.tickets.values()) == sorted(ticket.number for ticket in state.waiting)


def _next_lease(state: State, warning: Seconds) -> Seconds | None:
    """Find the next end of a lease, or the warning of one, among all allocations."""
    times = []
    for record in state.allocations.values():
        if record.ends is not None and record.lease is not None:
            warned = record.warned or warning == 0 or record.lease < 2 * warning
            times.append(record.ends if warned else record.ends - warning)
    return min(times, default=None)


def _check_warnings(rows: list[Row]) -> None:
    """Check that every end of a lease was announced at most once, and before it came."""
    told: set[tuple[str, Seconds]] = set()
    for row in rows:
        if isinstance(row.entry, LeaseEnding):
            end = row.entry.allocation, row.entry.ends
            assert end not in told
            assert row.at < row.entry.ends
            told.add(end)


def start_cluster(control: ControlPlane) -> None:
    control.tenant("acme")
    control.tenant("beta", memory_slices=12)
    control.node("n0", 2)
    control.node("n1", 1, A30)


@given(
    seed=st.integers(0, 1 << 32),
    policy=st.sampled_from(POLICIES),
    rules=st.sampled_from(RULES),
    warning=st.sampled_from([0, 0.5, 2, 10]),
    reclaim=st.sampled_from(RECLAIM),
)
@settings(max_examples=30)
def test_replaying_the_journal_gives_the_same_state_and_the_same_decisions(
    seed: int, policy: str, rules: ReservationRules, warning: Seconds, reclaim: ReclaimRules
) -> None:
    rng = random.Random(seed)
    control = ControlPlane(policy, rules, lease_warning=warning, reclaim=reclaim)
    start_cluster(control)
    for step in range(rng.randint(1, 120)):
        control.now += rng.choice([0, 0, 1, 4])
        control.ask(random_command(rng, control.state, step))
        _no_overlap(control.state)
        assert control.state.next_lease == _next_lease(control.state, warning)
    _check_warnings(control.rows)

    # Read from the beginning, and from a snapshot, through the encoded form.
    replayed = control.fresh()
    for row in control.rows:
        replayed.apply(msgspec.structs.replace(row, entry=decode(encode(row.entry))))
    snapshot = snapshot_of(control.state)
    assert snapshot_of(replayed) == snapshot
    restored = restore_snapshot(decode_snapshot(encode_snapshot(snapshot)), control.fresh())
    assert snapshot_of(restored) == snapshot
    _no_overlap(restored)
    replica = State(policy)
    for row in control.rows:
        replica.apply(row)
    assert snapshot_of(replica) == snapshot
    assert replica.next_lease == _next_lease(replica, 0)

    # All three get the same commands.
    first, *others = (
        ControlPlane(policy, rules, state, first_id=10_000, reclaim=reclaim)
        for state in (control.state, replayed, restored)
    )
    for step in range(60):
        command = random_command(rng, first.state, step)
        answers = []
        for one in (first, *others):
            one.now = control.now + step
            answers.append(one.ask(command))
        assert answers[0] == answers[1] == answers[2]
    assert first.rows == others[0].rows == others[1].rows


def test_a_gap_in_the_journal_is_refused() -> None:
    control = ControlPlane()
    start_cluster(control)
    state = control.fresh()
    with pytest.raises(Exception, match="jumps from entry 0 to 2"):
        state.apply(control.rows[1])


def test_a_journal_that_contradicts_the_cluster_is_refused() -> None:
    control = ControlPlane()
    start_cluster(control)
    state = control.fresh()
    for row in control.rows:
        entry = row.entry
        if entry.__class__.__name__ == "NodeAdded":
            moved = msgspec.structs.replace(row, entry=msgspec.structs.replace(entry, first=7))
            with pytest.raises(Exception, match="the journal says 7"):
                state.apply(moved)
            break
        state.apply(row)


def test_free_gpu_ids_are_reused_in_the_same_order_after_a_restart() -> None:
    control = ControlPlane()
    for name, gpus in (("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 3)):
        control.node(name, gpus)
    for name in ("b", "a", "d", "c"):
        assert control.ask(RemoveNode(name))[0] == 200
    snapshot = snapshot_of(control.state)
    restored = ControlPlane(state=restore_snapshot(snapshot, control.fresh()))
    assert snapshot_of(restored.state) == snapshot
    for one in (control, restored):
        for name, gpus in (("f", 2), ("g", 1), ("h", 1), ("i", 2), ("j", 2)):
            one.node(name, gpus)
    assert {n.name: n.gpus for n in control.state.nodes.values()} == {
        n.name: n.gpus for n in restored.state.nodes.values()
    }
