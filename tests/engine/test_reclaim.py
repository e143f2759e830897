"""Reclaim in the engine: the best claim, and when it is dropped."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.cluster_in_use import ClusterInUse

from slicewise.catalog import load_geometry
from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Reason, Rejection, Request
from slicewise.core.states import ILLEGAL
from slicewise.engine.queue import Queue, Ticket
from slicewise.engine.reclaim import Claim, Notice, Reclaim, ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import LineKey, Reservations, Window
from slicewise.engine.scheduler import Scheduler
from slicewise.engine.shares import Entitlement, Shares
from slicewise.engine.victims import Victim

A100, A30 = (load_geometry(name) for name in ("A100-80GB", "A30-24GB"))
SEEDS = st.integers(0, 1 << 32)
NOW = 1000.0


@dataclass
class World:
    """A cluster with preemptible allocations of several tenants, and the queue."""

    gpus: int = 1
    policy: str = "default"
    rules: ReclaimRules = field(default_factory=lambda: ReclaimRules(enabled=True))
    guarantee: int = 8

    def __post_init__(self) -> None:
        self.cluster, self.shares = Cluster(), Shares()
        for name, geometry in (("n0", A100), ("n1", A30)):
            self.cluster.add_node(name, geometry, self.gpus)
            self.shares.add_gpus(geometry, self.gpus)
        self.queue = Queue(self.shares)
        self.reservations = Reservations(self.cluster)
        self.reclaim = Reclaim(
            Scheduler(self.cluster, self.policy), self.queue, self.reservations, self.rules
        )
        self.victims: list[Victim] = []
        self.notices: list[Notice] = []
        self.refusal: Rejection | None = None
        self.shares.entitle("acme", Entitlement(guarantee=self.guarantee))

    def put(self, gpu: int, profile: str, start: int, tenant: str = "beta") -> Instance:
        """Place an instance of a tenant."""
        made = self.cluster.place(gpu, profile, start)
        geometry = self.cluster.state(gpu).geometry
        kind = geometry.profile(profile)
        self.shares.charge(tenant, geometry, kind.size, kind.compute)
        return made

    def victim(
        self, *instances: Instance, tenant: str = "beta", priority: int = 0, since: float = 0.0
    ) -> Victim:
        """Make instances a preemptible allocation."""
        made = Victim(f"a{len(self.victims):03}", tenant, priority, since, instances)
        self.victims.append(made)
        return made

    def wait(
        self, want: str, tenant: str = "acme", count: int = 1, held_until: float | None = None
    ) -> Ticket:
        """Queue a request, made long ago."""
        ticket = Ticket(
            len(self.queue) + 1, Request(want), count, tenant, entered=0.0, held_until=held_until
        )
        self.queue.enter(ticket)
        return ticket

    def find(self, now: float = NOW) -> Claim | None:
        return self.reclaim.find(
            lambda: iter(self.victims), self.notices, lambda ticket: self.refusal, now
        )

    def claim(self, now: float = NOW) -> Claim:
        """Find a claim, reserve its window and give notice."""
        claim = self.find(now)
        assert claim is not None
        self.reservations.set(claim.line, self.reclaim.windows_with(claim))
        for one in claim.victims:
            self.victims.remove(one)
            self.notices.append(Notice(one.id, one.tenant, one.slices, claim.window.gpu))
        return claim


def full(**terms: object) -> World:
    """A World where beta has the whole A100, preemptible."""
    world = World(**terms)  # type: ignore[arg-type]
    world.victim(world.put(0, "7g.80gb", 0))
    return world


def by_hand(world: World, ticket: Ticket) -> tuple[object, ...] | None:
    """The rank of the best claim, from all GPUs, all placements and all sets of victims."""
    ranks = []
    room = world.guarantee - world.shares.slices("acme")
    for gpu in range(world.cluster.gpus):
        geometry = world.cluster.state(gpu).geometry
        if world.reservations.on(gpu) is not None or not world.cluster.takes_instances(gpu):
            continue
        for placement in geometry.placements:
            wastes = {p: waste for waste, p in ticket.request.candidates(geometry)}
            if placement.profile not in wastes or placement.profile.size > room:
                continue
            inside = {
                one.id
                for one in world.cluster.instances_on(gpu)
                if range(
                    max(one.start, placement.start),
                    min(one.start + one.size, placement.start + placement.window.bit_count()),
                )
            }
            if world.cluster.once_cleared(gpu, placement.number) == ILLEGAL:
                continue
            old = [v for v in world.victims if v.since + world.rules.min_run <= NOW]
            for count in range(1, 4):
                for chosen in itertools.combinations(old, count):
                    ids = {one.id for v in chosen for one in v.instances}
                    needed = all({one.id for one in v.instances} & inside for v in chosen)
                    if inside <= ids and needed and spares(world, chosen):
                        ranks.append(
                            rank_of(chosen, wastes[placement.profile], gpu, placement.start)
                        )
    return min(ranks, default=None)


def spares(world: World, chosen: Iterable[Victim]) -> bool:
    """Whether no tenant falls below its guarantee."""
    chosen = list(chosen)
    return all(
        world.shares.slices(tenant) - sum(v.slices for v in chosen if v.tenant == tenant)
        >= world.shares.entitlement(tenant).guarantee
        for tenant in {v.tenant for v in chosen}
    )


def rank_of(chosen: Iterable[Victim], waste: object, gpu: int, start: int) -> tuple[object, ...]:
    chosen = list(chosen)
    return (
        len(chosen),
        max(v.priority for v in chosen),
        sum(v.slices for v in chosen),
        -min(v.since for v in chosen),
        waste,
        gpu,
        start,
    )


@settings(max_examples=40)
@given(SEEDS)
def test_the_best_claim_is_that_of_an_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    world = World(gpus=2, guarantee=rng.choice([3, 4, 8]))
    for tenant in ("beta", "gamma"):
        world.shares.entitle(tenant, Entitlement(guarantee=rng.choice([0, 0, 4, 8])))
    placed: list[tuple[Instance, str]] = []
    for _ in range(16):
        gpu = rng.randrange(4)
        placement = rng.choice(world.cluster.state(gpu).geometry.placements)
        if world.cluster.is_open(gpu, placement.number) and placement.profile.compute < 7:
            tenant = rng.choice(["beta", "gamma"])
            placed.append((world.put(gpu, placement.profile.name, placement.start, tenant), tenant))
    while placed:
        one, tenant = placed.pop()
        more = [other for other in placed if other[1] == tenant]
        instances = [one]
        if more and rng.random() < 0.3:
            placed.remove(more[0])
            instances.append(more[0][0])
        if rng.random() < 0.85:
            world.victim(
                *instances,
                tenant=tenant,
                priority=rng.choice([0, 0, 1]),
                since=rng.choice([0.0, 5.0, 700.0]),
            )
    if rng.random() < 0.2:
        world.cluster.hold(rng.randrange(4))
    ticket = world.wait(rng.choice(["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "2g.12gb"]))
    claim = world.find()
    if claim is None:
        assert by_hand(world, ticket) is None
        return
    gpu = claim.window.gpu
    placement = world.cluster.state(gpu).geometry.placements[claim.window.placement]
    candidates = ticket.request.candidates(world.cluster.state(gpu).geometry)
    wastes = {profile: waste for waste, profile in candidates}
    found = rank_of(claim.victims, wastes[placement.profile], gpu, placement.start)
    assert found == by_hand(world, ticket)
    assert claim.window.opens == NOW + 30
    assert claim.window.claimed


def test_a_claim_waits_for_the_request_and_for_the_victim() -> None:
    world = full()
    world.victims[0] = world.victims[0]._replace(since=500.0)
    assert world.reclaim.next_due is None, "nothing waits"
    world.wait("3g.40gb")
    assert world.reclaim.next_due == 0.0, "nothing is known yet"
    assert world.find(100.0) is None
    assert world.reclaim.next_due == 120.0
    assert world.find(120.0) is None
    assert world.reclaim.next_due == 1100.0
    assert world.find(1100.0) is not None


def test_who_claims_nothing() -> None:
    for world in (full(rules=ReclaimRules()), full(policy="peer-hami")):
        world.wait("3g.40gb")
        assert world.find() is None
        assert world.reclaim.next_due is None
    world = full()
    world.wait("3g.40gb", count=2)
    world.wait("3g.40gb", tenant="gamma")
    assert world.find() is None
    held = full()
    held.wait("3g.40gb", held_until=NOW + 5)
    assert held.find() is None
    assert held.reclaim.next_due is None  # who holds it back lets it go
    refused = full()
    ticket = refused.wait("3g.40gb")
    refused.refusal = Rejection(ticket.request, Reason.QUOTA, "too much")
    assert refused.find() is None


def test_no_claim_if_a_window_of_its_own_opens_before_the_notice_is_over() -> None:
    world = full(gpus=2)
    ticket = world.wait("7g.80gb")
    own = world.cluster.state(1).geometry.placement("7g.80gb", 0)
    assert own is not None
    world.put(1, "7g.80gb", 0)
    world.reservations.set(ticket.line, [Window(1, own.number, NOW + 10)])
    assert world.find() is None
    assert world.reclaim.next_due == NOW + 10
    claim = world.claim(NOW + 10)
    assert claim.window.gpu == 0
    assert world.reservations.of(ticket.line) == (claim.window,), "it replaces the other window"
    assert world.find(NOW + 10) is None


def test_a_window_of_another_line_is_not_claimed_and_its_own_is() -> None:
    world = full()
    placement = A100.placement("7g.80gb", 0)
    assert placement is not None
    other = LineKey("gamma", Request("7g.80gb"), 1)
    ticket = world.wait("7g.80gb")
    world.reservations.set(other, [Window(0, placement.number, None)])
    assert world.find() is None
    world.reservations.set(other, [])
    world.reservations.set(ticket.line, [Window(0, placement.number, None)])
    world.claim()
    assert [window.claimed for window in world.reservations.of(ticket.line)] == [True]
    assert world.reclaim.blockers == {0: {world.cluster.instances_on(0)[0].id}}


def test_a_line_that_can_claim_nothing_does_not_keep_another_from_it() -> None:
    world = World()
    world.put(0, "1g.10gb", 6)
    world.victim(world.put(0, "4g.40gb", 0))
    world.wait("7g.80gb")
    assert world.find() is None
    fits = world.wait("4g.40gb")
    world.wait("3g.40gb")
    claim = world.find()
    assert claim is not None
    assert claim.line == fits.line


def test_an_instance_elsewhere_may_hold_what_a_window_needs() -> None:
    world = World()
    world.put(0, "1g.10gb+me", 6)
    world.victim(world.put(0, "4g.40gb", 0))
    world.wait("1g.10gb+me")
    assert world.find() is None
    world.wait("1g.10gb")
    assert world.find() is not None


def test_a_claim_leaves_a_tenant_what_it_is_guaranteed() -> None:
    world = World()
    for start in (0, 4):
        world.victim(world.put(0, "3g.40gb", start))
    world.shares.entitle("beta", Entitlement(guarantee=4))
    world.wait("7g.80gb")
    assert world.find() is None, "either may end, but not both"
    world.shares.entitle("beta", Entitlement())
    claim = world.find()
    assert claim is not None
    assert len(claim.victims) == 2


def test_claims_are_limited_by_the_guarantee_and_by_the_number_of_gpus() -> None:
    world = World(gpus=2, guarantee=20)
    for gpu in range(2):
        world.victim(world.put(gpu, "7g.80gb", 0))
    for _ in range(3):
        world.wait("7g.80gb")
    world.claim()
    assert world.find() is None, "one at a time on two GPUs"
    assert ReclaimRules().most(100) == 5
    assert ReclaimRules().most(0) == 0
    small = World(gpus=2, guarantee=8)
    for gpu in range(2):
        small.victim(small.put(gpu, "4g.40gb", 0))
        small.victim(small.put(gpu, "3g.40gb", 4))
    small.wait("4g.40gb")
    small.wait("1g.10gb")
    small.claim()
    assert small.reclaim._room("acme") == 4


@pytest.mark.parametrize("how", ["", "guarantee", "none", "victim", "blocked"])
def test_a_claim_is_broken_when_a_condition_fails(how: str) -> None:
    world = full()
    world.wait("7g.80gb")
    claim = world.claim()
    if how == "guarantee":
        world.shares.entitle("acme", Entitlement(guarantee=7))
    elif how == "none":
        world.shares.entitle("acme", Entitlement())
    elif how == "victim":
        world.shares.entitle("beta", Entitlement(guarantee=1))
    broken = world.reclaim.broken(world.notices, lambda instance, time: how != "blocked")
    assert broken == (None if not how else (claim.line, claim.window))


def test_a_request_that_is_held_back_does_not_keep_others_from_a_reservation() -> None:
    world = ClusterInUse([(A100, 1)], rules=ReservationRules(after=3.0))
    world.ask("beta", "4g.40gb")
    old = world.ask("beta", "7g.80gb")
    world.queue.hold(old, math.inf)
    world.advance(1.0)
    world.ask("acme", "7g.80gb")
    world.advance(2.0)
    world.ask("beta", "1g.10gb")  # it overtakes
    world.advance(4.0)
    (pool,) = [line.tenant for line, _ in world.reservations]
    assert pool == "acme"
    assert world.dispatcher.next_due is None


def test_rules() -> None:
    for value in (-1.0, math.inf, math.nan):
        with pytest.raises(SlicewiseError, match="grace of reclaim"):
            ReclaimRules(grace=value)
        with pytest.raises(SlicewiseError, match="min_run of reclaim"):
            ReclaimRules(min_run=value)
        with pytest.raises(SlicewiseError, match="notice of reclaim"):
            ReclaimRules(notice=value)
    rules = ReclaimRules()
    assert [rules.rest(count) for count in (1, 2, 3)] == [60, 120, 240]
    assert rules.rest(12) == rules.rest(1000)
