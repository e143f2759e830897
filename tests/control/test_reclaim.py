"""Reclaim: preemptible allocations end for a tenant that stays within its guarantee."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.control_plane import A30, ControlPlane
from tests.control.fake_node import FakeNode

from slicewise.api.base import moment
from slicewise.control.actors import internal
from slicewise.control.commands import (
    CarryOut,
    Cordon,
    Drain,
    MoveInstance,
    Release,
    SetTenant,
)
from slicewise.control.snapshot import (
    decode_snapshot,
    encode_snapshot,
    restore_snapshot,
    snapshot_of,
)
from slicewise.control.state import State
from slicewise.control.waiting import Waiting
from slicewise.core.request import Request
from slicewise.engine.reclaim import ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import (
    Cause,
    Ended,
    Queued,
    QuotaRecord,
    Row,
    Served,
    decode,
    encode,
)
from slicewise.journal.reclaim_entries import HeldBack, Reclaiming

ON = ReclaimRules(enabled=True)
LONG = 30 * 86400.0


def plane(gpus: int = 1, rules: ReclaimRules = ON, **quota: Any) -> ControlPlane:
    """A cluster where acme has a guarantee, and beta fills everything."""
    control = ControlPlane(reclaim=rules)
    control.tenant("acme", **({"guarantee": 8} | quota))
    control.tenant("beta")
    control.node(gpus=gpus)
    return control


def run(control: ControlPlane, seconds: float) -> list[Row]:
    """Let time pass as the commit loop does: from one due time to the next."""
    until, rows = control.now + seconds, []
    for _ in range(10_000):
        due = control.handler.next_time
        if due is None or due > until:
            rows += control.wait(until - control.now)
            return rows
        assert due >= control.now or due == 0.0
        rows += control.wait(max(0.0, due - control.now))
        after = control.handler.next_time
        assert after is None or after > control.now, "what is due is done"
    raise AssertionError("the time does not pass")


def kinds(rows: list[Row]) -> list[str]:
    return [row.entry.__class__.__name__ for row in rows]


def state_of(control: ControlPlane, body: dict[str, Any]) -> str:
    record = control.state.allocations.get(body["id"])
    return "ended" if record is None else record.state


def test_a_claim_from_the_notice_to_the_successor() -> None:
    control = plane()
    _, old = control.create("7g.80gb", "beta", preemptible=True, labels={"job": "x"}, lease=9e5)
    control.now += 500
    _, mine = control.create("3g.40gb", wait=LONG)
    assert kinds(run(control, 99)) == []
    assert kinds(run(control, 20)) == []  # beta's has run for 600 seconds
    rows = run(control, 1)  # and mine has waited for 120
    assert kinds(rows) == ["Reserved", "Reclaiming"]
    told = rows[1].entry
    assert isinstance(told, Reclaiming)
    assert told.at == control.now + 30
    assert told.tenant.name == "beta"
    view = Waiting(control.state).view(control.state.allocations[old["id"]], control.now)
    assert view.reclaimed_at is not None
    assert view.ends_at != view.reclaimed_at

    assert kinds(run(control, 29)) == []
    rows = run(control, 1)
    assert kinds(rows) == ["Ended", "Queued", "Served", "Reserved", "HeldBack"]
    assert state_of(control, mine) == "placed"
    ended, queued, held = rows[0].entry, rows[1].entry, rows[4].entry
    assert isinstance(ended, Ended)
    assert ended.allocation.cause is Cause.RECLAIMED
    assert isinstance(queued, Queued)
    new = queued.allocation
    assert new.id in ended.allocation.detail
    assert (new.replaces, new.reclaims, new.requested) == (old["id"], 1, 1000.0)
    assert (new.want, new.labels, new.lease, new.preemptible) == (
        ended.allocation.want,
        {"job": "x"},
        9e5,
        True,
    )
    assert new.deadline is None
    assert isinstance(held, HeldBack)
    assert held.until == control.now + 60

    # It rests for a minute, although there is room, and then it comes before those behind it.
    _, behind = control.create("7g.80gb", "beta", wait=LONG)
    control.release(mine["id"])
    assert state_of(control, behind) == "placed", "it is not held back"
    control.release(behind["id"])
    why = Waiting(control.state).view(control.state.allocations[new.id], control.now).waiting
    assert why is not None
    assert why.reason == "held back"
    _, behind = control.create("7g.80gb", "beta", wait=LONG)
    rows = run(control, 60)
    assert kinds(rows) == ["HeldBack", "Reserved"], "it was overtaken while it rested"
    control.release(behind["id"])
    assert control.state.allocations[new.id].state == "placed"


def test_the_rest_doubles_with_every_reclaim() -> None:
    control = plane(rules=ReclaimRules(enabled=True, grace=0, min_run=0, notice=0))
    control.create("7g.80gb", "beta", preemptible=True)
    rests = []
    for _ in range(4):
        _, mine = control.create("7g.80gb", wait=LONG)
        run(control, 0)
        assert state_of(control, mine) == "placed"
        (held,) = [
            row.entry
            for row in control.rows
            if isinstance(row.entry, HeldBack)
            and row.at == control.now
            and row.entry.until is not None
        ]
        assert held.until is not None
        rests.append(held.until - control.now)
        control.release(mine["id"])
        run(control, rests[-1])
        (again,) = control.state.allocations.values()
        assert again.state == "placed"
        assert again.reclaims == len(rests)
    assert rests == [60, 120, 240, 480]


@pytest.mark.parametrize(
    ("acme", "beta", "terms", "rules"),
    [
        ({"guarantee": 0}, {}, {"preemptible": True}, ON),
        ({"guarantee": 3}, {}, {"preemptible": True}, ON),
        ({}, {"guarantee": 1}, {"preemptible": True}, ON),
        ({}, {}, {"preemptible": False}, ON),
        ({}, {}, {"preemptible": True}, ReclaimRules()),
        ({"instances": 0}, {}, {"preemptible": True}, ON),
    ],
    ids=["no guarantee", "beyond it", "victim's guarantee", "not preemptible", "off", "quota"],
)
def test_who_claims_nothing(
    acme: dict[str, Any], beta: dict[str, Any], terms: dict[str, Any], rules: ReclaimRules
) -> None:
    control = plane(rules=rules, **acme)
    control.ask(SetTenant("beta", QuotaRecord(**beta), new=False))
    control.create("7g.80gb", "beta", **terms)
    _, mine = control.create("3g.40gb", wait=LONG)
    run(control, 5000)
    assert state_of(control, mine) in ("queued", "ended")
    assert not any(isinstance(row.entry, Reclaiming) for row in control.rows)


def test_an_allocation_with_several_instances_ends_whole() -> None:
    control = plane(gpus=2)
    _, old = control.create("4g.40gb", "beta", count=2, preemptible=True)
    control.create("3g.40gb", "beta", count=2)
    _, mine = control.create("4g.40gb", wait=LONG)
    run(control, 640)
    assert state_of(control, mine) == "placed"
    assert state_of(control, old) == "ended"
    (new,) = [one for one in control.state.allocations.values() if one.replaces == old["id"]]
    assert (new.count, new.state) == (2, "queued")


def test_the_fewest_victims_of_the_lowest_priority_with_the_fewest_slices_and_youngest() -> None:
    control = plane(gpus=5)
    for profiles, priority in (
        (("3g.40gb", "3g.40gb"), 0),
        (("7g.80gb",), 1),
        (("7g.80gb",), 0),
        (("7g.80gb",), 0),
    ):
        control.now += 1
        for profile in profiles:
            _, last = control.create(profile, "beta", preemptible=True, priority=priority)
    control.now += 1
    control.create("7g.80gb", "beta", preemptible=True, count=1, priority=5)
    control.now += 1000
    _, mine = control.create("7g.80gb", wait=LONG)
    run(control, 150)
    assert state_of(control, mine) == "placed"
    (gone,) = [row.entry for row in control.rows if isinstance(row.entry, Ended)]
    assert gone.allocation.id == last["id"]


def told(control: ControlPlane) -> bool:
    return any(one.reclaimed_at for one in control.state.allocations.values())


@pytest.mark.parametrize("how", ["gives up", "terms", "victim", "room", "cordon", "drain"])
def test_a_claim_that_does_not_hold_any_more_is_dropped(how: str) -> None:
    control = plane(gpus=2)
    _, other = control.create("7g.80gb", "beta")
    _, old = control.create("7g.80gb", "beta", preemptible=True)
    _, mine = control.create("7g.80gb", wait=LONG)
    run(control, 610)
    assert told(control)
    if how == "gives up":
        control.release(mine["id"])
    elif how == "terms":
        control.ask(SetTenant("acme", QuotaRecord(guarantee=7), new=False))
    elif how == "victim":
        control.ask(SetTenant("beta", QuotaRecord(guarantee=9), new=False))
    elif how == "room":
        control.release(other["id"])
        assert state_of(control, mine) == "placed"
    elif how == "cordon":
        control.ask(Cordon("n0"))
    else:
        control.ask(Drain("n0", evict=True))
    assert not told(control)
    assert not control.state.notices
    assert not any(w.claimed for _, pool in control.state.reservations for w in pool)
    run(control, 200)
    expected = "ended" if how == "drain" else "placed"
    assert state_of(control, old) == expected
    assert not any(
        isinstance(row.entry, Ended) and row.entry.allocation.cause is Cause.RECLAIMED
        for row in control.rows
    )


def test_a_claimed_window_replaces_a_reserved_one() -> None:
    control = ControlPlane(
        rules=ReservationRules(after=10, share=1), reclaim=ReclaimRules(enabled=True, min_run=900)
    )
    control.tenant("acme", guarantee=8)
    control.tenant("beta")
    control.node(gpus=2)
    _, first = control.create("7g.80gb", "beta")
    control.create("4g.40gb", "beta", preemptible=True)
    control.create("1g.10gb", "beta", preemptible=True, lease=5.0)
    _, mine = control.create("7g.80gb", wait=LONG)
    control.wait(6)
    control.create("1g.10gb", "beta", preemptible=True)  # it overtakes, so mine gets a window
    run(control, 60)
    assert sum(len(pool) for _, pool in control.state.reservations) == 1
    run(control, 900)
    assert state_of(control, mine) == "placed"
    assert state_of(control, first) == "placed"
    assert not len(control.state.reservations)


def test_on_a_managed_node_the_window_is_kept_until_the_instance_is_gone() -> None:
    control = ControlPlane(reclaim=ON)
    control.tenant("acme", guarantee=8)
    control.tenant("beta")
    control.tenant("gamma")
    node = FakeNode("n0", ["GPU-0"], random.Random(1))
    assert node.hello(control) == 200

    def turn() -> None:
        node.listen(control)
        node.work(0)
        assert node.tell(control, node.report()) == 200

    turn()
    _, old = control.create("7g.141gb", "beta", preemptible=True)
    turn()
    turn()
    assert state_of(control, old) == "active"
    assert node.heard is not None
    assert [one.notice for one in node.heard.instances] == [""]
    _, mine = control.create("7g.141gb", wait=LONG)
    _, others = control.create("1g.18gb", "gamma", wait=LONG)
    run(control, 610)
    node.listen(control)
    at = control.state.allocations[old["id"]].reclaimed_at
    assert [one.notice for one in node.heard.instances] == [moment(at)]
    assert [one.wanted for one in node.heard.instances] == ["present"]
    run(control, 30)
    node.listen(control)
    assert [one.wanted for one in node.heard.instances] == ["absent"]
    run(control, 1000)
    assert state_of(control, mine) == "queued"
    assert any(w.claimed for _, pool in control.state.reservations for w in pool)
    turn()
    assert state_of(control, mine) == "placed"
    assert state_of(control, others) == "queued"
    turn()
    turn()
    assert state_of(control, mine) == "active"


def test_a_moved_victim_is_spared() -> None:
    control = plane(gpus=2)
    _, old = control.create("3g.40gb", "beta", preemptible=True)
    gpu, start = old["gpu"], old["start"]
    for profile in ("3g.40gb", "4g.40gb", "3g.40gb"):
        control.create(profile, "beta")
    _, mine = control.create("3g.40gb", wait=LONG)
    run(control, 610)
    assert told(control)
    (free,) = [
        one
        for one in control.state.allocations.values()
        if one.parts and one.parts[0].gpu != gpu and one.want.profile == "3g.40gb"
    ]
    place = free.parts[0]
    # Room appears elsewhere, and the operator moves the victim there before the queue is served.
    control.handler.decide(Release(free.id), internal("operator"), control.now)
    move = MoveInstance(old["id"], 0, "n0", gpu, start, "n0", place.gpu, place.start)
    status, body = control.ask(CarryOut((move,)))
    assert status == 200, body
    assert not told(control)
    assert state_of(control, mine) == "placed"
    assert state_of(control, old) == "placed"


def test_a_share_counts_preemptible_slices_at_their_price() -> None:
    control = ControlPlane(state=State(preemptible_price=25))
    control.tenant("acme")
    control.node()
    control.create("4g.40gb", preemptible=True)
    control.create("3g.40gb")
    request = Request("1g.10gb")
    (tenant,) = control.state.tenants
    assert control.state.shares.of(tenant, request) == pytest.approx((0.25 * 4 + 4) / 8)
    for identity in list(control.state.allocations):
        control.release(identity)
    assert control.state.shares.of(tenant, request) == 0.0


def test_random_streams_reclaim() -> None:
    """The properties below are about something: most streams reclaim allocations."""
    rules = ReclaimRules(enabled=True, grace=20, min_run=100, notice=10)
    counts = []
    for seed in range(6):
        control, _ = crowd(seed, rules)
        run(control, 1000)
        counts.append(check(control, control.fresh()))
    assert sum(counts) >= 6


# Random streams

PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.6gb", "4g.24gb")
TENANTS = ("acme", "beta", "gamma")


def crowd(
    seed: int, rules: ReclaimRules, reserve: float = 50.0
) -> tuple[ControlPlane, random.Random]:
    """A cluster where more is asked for than there is."""
    rng = random.Random(seed)
    control = ControlPlane(rules=ReservationRules(after=reserve, share=0.5), reclaim=rules)
    for name in TENANTS:
        control.tenant(name, guarantee=rng.choice([0, 4, 8, 13]))
    control.node("n0", rng.randint(1, 3))
    control.node("n1", rng.randint(1, 2), A30)
    for _ in range(rng.randint(2, 8)):  # one tenant borrows first
        control.create(rng.choice(PROFILES), "gamma", preemptible=True, count=rng.choice([1, 1, 2]))
    for _ in range(rng.randint(5, 30)):
        control.now += rng.choice([0, 1, 10])
        ask(control, rng)
    return control, rng


def ask(control: ControlPlane, rng: random.Random) -> None:
    control.create(
        rng.choice(PROFILES),
        rng.choice(TENANTS),
        preemptible=rng.random() < 0.7,
        wait=LONG,
        count=rng.choice([1, 1, 1, 2]),
        priority=rng.choice([0, 0, 1]),
    )


def check_claims(state: State) -> None:
    """Every tenant stays within its guarantee with what it claims."""
    for identity, tenant in state.tenants.items():
        claimed = sum(
            state.cluster.state(w.gpu).geometry.placements[w.placement].profile.size
            for line, pool in state.reservations
            for w in pool
            if w.claimed and line.tenant == identity
        )
        assert not claimed or tenant.usage.memory_slices + claimed <= tenant.quota.guarantee


def check(control: ControlPlane, fresh: State) -> int:
    """Replay all rows, and check at each what may be claimed; returns how often was reclaimed."""
    reclaimed = 0
    for row in control.rows:
        entry = row.entry
        if row.at > fresh.at:
            check_claims(fresh)
        if isinstance(entry, Ended) and entry.allocation.cause is Cause.RECLAIMED:
            record = entry.allocation
            assert record.reclaimed_at is not None
            assert record.reclaimed_at <= row.at
            assert record.preemptible
            assert len(record.parts) == record.count, "it ends whole"
            assert record.id in fresh.notices
            fresh.apply(row)
            tenant = fresh.tenants[record.tenant.id]
            assert tenant.usage.memory_slices >= tenant.quota.guarantee
            reclaimed += 1
            continue
        if isinstance(entry, Served):
            assert entry.allocation not in fresh.held
            part, tenant = entry.parts[0], fresh.tenants[entry.tenant.id]
            held = fresh.reservations.on(fresh.nodes[part.node].gpus[part.gpu])
            if held is not None and held[1].claimed and held[0].tenant == entry.tenant.id:
                start = fresh.cluster.state(held[1].gpu).geometry.placements[held[1].placement]
                if start.start == part.start:
                    assert tenant.usage.memory_slices + part.size <= tenant.quota.guarantee
        fresh.apply(row)
    return reclaimed


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=15)
def test_with_fixed_demand_reclaim_comes_to_rest(seed: int) -> None:
    """I10: a closed system ends with no notice, no rest and nothing more to do."""
    rules = ReclaimRules(enabled=True, grace=20, min_run=100, notice=10)
    control, _ = crowd(seed, rules)
    run(control, 50_000)
    assert not control.state.notices
    assert not control.state.held
    assert kinds(run(control, 50_000)) == []
    reclaimed = check(control, control.fresh())
    placed = sum(tenant.quota.guarantee for tenant in control.state.tenants.values())
    # A claim that is used brings its tenant closer to its guarantee, by a slice at least. It ends
    # no more allocations than there are slices in a window.
    assert reclaimed <= 8 * placed


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=15)
def test_a_restart_in_the_middle_changes_nothing(seed: int) -> None:
    rules = ReclaimRules(enabled=True, grace=5, min_run=20, notice=30)
    control, rng = crowd(seed, rules, random.Random(seed).choice([5.0, 500.0]))
    for _ in range(200):
        if control.state.notices or (control.state.held and rng.random() < 0.2):
            break
        control.wait(5)
    replayed = control.fresh()
    for row in control.rows:
        replayed.apply(msgspec.structs.replace(row, entry=decode(encode(row.entry))))
    snapshot = snapshot_of(control.state)
    assert snapshot_of(replayed) == snapshot
    restored = restore_snapshot(decode_snapshot(encode_snapshot(snapshot)), control.fresh())
    assert snapshot_of(restored) == snapshot
    for state in (replayed, restored):
        assert sorted(state.notices) == sorted(control.state.notices)
        assert sorted(state.held) == sorted(control.state.held)
        assert sorted(state.preemptible) == sorted(control.state.preemptible)
    planes = [
        ControlPlane("default", control.rules, state, first_id=10_000, reclaim=rules)
        for state in (control.state, replayed, restored)
    ]
    for number, one in enumerate(planes):
        dice = random.Random(seed + 1)
        one.now = control.now
        for _ in range(40):
            living = list(one.state.allocations)
            if dice.random() < 0.4:
                ask(one, dice)
            elif living and dice.random() < 0.5:
                one.release(dice.choice(living))
            one.wait(dice.choice([1, 5, 31]))
        assert one.rows == planes[0].rows, number
    everything = ControlPlane("default", control.rules, control.fresh())
    everything.rows = [*control.rows, *planes[0].rows]
    check(everything, everything.state)
