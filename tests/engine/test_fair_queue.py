"""The invariants of the queue, on random streams of several tenants, models, counts and leases."""

from __future__ import annotations

import os
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.cluster_in_use import ClusterInUse
from tests.engine.plain_queue import PlainDispatcher, PlainQueue

from slicewise.catalog import load_geometry
from slicewise.core.request import Need, Reason, Rejection, Request
from slicewise.engine.dispatcher import Dispatcher
from slicewise.engine.queue import Queue, Ticket
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import Window
from slicewise.engine.shares import Entitlement

A100, A30 = (load_geometry(name) for name in ("A100-80GB", "A30-24GB"))
TENANTS = ("ana", "bob", "cem", "dia")
WANTS: tuple[Request, ...] = (
    *(Request(profile.name) for profile in A100.profiles),
    *(Request(profile.name) for profile in A30.plain_profiles),
    Request(Need(2, 15.0)),
    Request("1g.6gb", ("A30-24GB",)),
    Request("7g.80gb", ("A100-80GB",)),
)
SEEDS = st.integers(0, 1 << 32)
EXAMPLES = int(os.environ.get("SLICEWISE_QUEUE_EXAMPLES", "20"))
"""Random streams for each invariant; more of them in `make soak`."""


def busy(
    seed: int,
    leases: str = "some",
    kinds: tuple[type[Queue], type[Dispatcher]] = (Queue, Dispatcher),
) -> tuple[ClusterInUse, random.Random]:
    """A cluster with more tenants than room, and the randomness to go on with it."""
    rng = random.Random(seed)
    cluster = ClusterInUse(
        [(A100, rng.randint(1, 4)), (A30, rng.randint(1, 3)), (A100, rng.randint(1, 3))],
        policy=rng.choice(["least-lost", "least-lost", "round-robin"]),
        rules=ReservationRules(after=rng.choice([0.0, 1.0, 5.0]), share=rng.choice([0.1, 0.5, 1])),
        quotas={"bob": rng.choice([8, 24])} if rng.random() < 0.5 else {},
        kinds=kinds,
    )
    for tenant in TENANTS:
        cluster.entitle(
            tenant,
            Entitlement(rng.choice([0.5, 1.0, 4.0]), rng.choice([0, 0, 8]), rng.choice([0, 2])),
        )
    for _ in range(60):
        step(cluster, rng, leases)
    return cluster, rng


def step(cluster: ClusterInUse, rng: random.Random, leases: str = "some") -> None:
    """One thing that may happen."""
    dice = rng.random()
    if dice < 0.62:
        lease = float(rng.randint(1, 20))
        given_lease = {"all": True, "none": False, "some": rng.random() < 0.5}[leases]
        cluster.ask(
            rng.choice(TENANTS),
            rng.choice(WANTS),
            rng.choice([1, 1, 1, 2, 3]),
            lease if given_lease else None,
            rng.choice([0, 0, 1, 3]),
        )
    elif dice < 0.8 and leases != "all":
        numbers = [*cluster.running, *(ticket.number for ticket in cluster.queue)]
        if numbers:
            cluster.end(rng.choice(numbers))
    elif dice < 0.82:
        node = rng.choice(cluster.cluster.nodes)
        if node.schedulable:
            cluster.cluster.drain(node.name)
        else:
            cluster.cluster.resume(node.name)
            cluster.dispatcher.room_appeared()
        cluster.settle()
    else:
        cluster.advance(cluster.now + rng.choice([0.5, 1.0, 3.0]))


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_no_request_waits_while_a_window_is_open_to_it(seed: int) -> None:
    """I1, and I6: what is reserved stays within the caps."""
    cluster, rng = busy(seed)
    for _ in range(30):
        step(cluster, rng)
        cluster.check_reservations()
        for ticket in cluster.queue:
            if ticket.count == 1:
                assert not cluster.open_to(ticket), ticket


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_a_second_pass_serves_nothing(seed: int) -> None:
    """I2."""
    cluster, rng = busy(seed)
    for _ in range(20):
        step(cluster, rng)
        cluster.dispatcher.serve(cluster.now)
        served = list(cluster.served)
        windows = list(cluster.reservations)
        cluster.dispatcher.room_appeared()
        cluster.dispatcher.serve(cluster.now)
        assert cluster.served == served
        assert list(cluster.reservations) == windows


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_a_pass_costs_shapes_and_not_tickets(seed: int) -> None:
    """I7: attempts <= served + shapes * (1 + reservations)."""
    cluster, rng = busy(seed)
    for _ in range(20):
        for _ in range(10):
            cluster.ask(rng.choice(TENANTS), rng.choice(WANTS))
        shapes, reserved = cluster.queue.shapes, len(cluster.reservations)
        served, attempts = len(cluster.served), cluster.dispatcher.attempts
        if cluster.running:
            cluster.end(rng.choice(list(cluster.running)))
        made = cluster.dispatcher.attempts - attempts
        reserved = max(reserved, len(cluster.reservations))
        assert made <= len(cluster.served) - served + shapes * (1 + reserved)


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_requests_for_other_models_have_no_influence(seed: int) -> None:
    """I3: what happens on a model that a request cannot use never changes its outcome."""
    for_a100 = ("7g.80gb", "3g.40gb", "1g.10gb", "2g.20gb")
    outcomes = []
    for with_others in (False, True):
        rng, others = random.Random(seed), random.Random(seed + 1)
        cluster = ClusterInUse([(A100, 3), (A30, 3)])
        history = []
        asked: list[int] = []
        extra: list[int] = []
        for _ in range(80):
            if with_others:
                extra.append(
                    cluster.ask(others.choice(("dia", "eli")), others.choice(("1g.6gb", "4g.24gb")))
                )
                if others.random() < 0.5 and (n := others.choice(extra)) in cluster.running:
                    cluster.end(n)
            if rng.random() < 0.7:
                asked.append(
                    cluster.ask(
                        rng.choice(TENANTS[:3]), Request(rng.choice(for_a100), ("A100-80GB",))
                    )
                )
            elif (number := rng.choice(asked) if asked else 0) in cluster.running:
                cluster.end(number)
            cluster.advance(cluster.now + 1)
            placed = [asked.index(n) for n in asked if n in cluster.running]
            history.append([(n, cluster.running[asked[n]].instances[0][1:]) for n in placed])
        outcomes.append(history)
    assert outcomes[0] == outcomes[1]


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_promises_are_kept_and_only_move_earlier(seed: int) -> None:
    """I4: with exact leases the k-th of a line is placed no later than the k-th opening."""
    rng = random.Random(seed)
    cluster = ClusterInUse(
        [(A100, rng.randint(2, 6))], rules=ReservationRules(after=2.0, share=rng.choice([0.2, 1]))
    )
    promised: dict[int, float] = {}
    kept = 0
    for _ in range(150):
        tenant = rng.choice(TENANTS)
        profile = rng.choice(("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"))
        cluster.ask(tenant, profile, lease=float(rng.randint(1, 15)))
        cluster.advance(cluster.now + rng.choice([0.25, 0.5]))
        for number in list(promised):
            if number not in cluster.queue:
                assert cluster.now <= promised.pop(number) + 0.5
                kept += 1
        for line, pool in cluster.reservations:
            waiting = list(cluster.queue.line(line) or ())
            for position, window in enumerate(pool):
                assert window.opens is not None
                number = waiting[position]
                assert window.opens <= promised.get(number, window.opens)
                promised[number] = window.opens
                assert cluster.now <= window.opens


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_without_leases_a_holder_waits_for_the_present_blockers_at_most(seed: int) -> None:
    """I5: once a window is reserved, no instance enters it before its holder."""
    cluster, rng = busy(seed, leases="none")
    for _ in range(40):
        before = {
            (line, window.gpu, window.placement): {
                b.id for b in cluster.reservations.blockers(window)
            }
            for line, pool in cluster.reservations
            for window in pool
        }
        tickets = list(cluster.queue)
        step(cluster, rng, "none")
        # Where a holder was placed or gave up, the same window may be reserved once more.
        used = {ticket.line for ticket in tickets if ticket.number not in cluster.queue}
        for line, pool in cluster.reservations:
            for window in pool:
                known = before.get((line, window.gpu, window.placement))
                if known is not None and line not in used:
                    assert {b.id for b in cluster.reservations.blockers(window)} <= known


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_removing_the_stated_reason_helps(seed: int) -> None:
    """I9: the request is placed, or waits for another reason."""
    cluster, rng = busy(seed)
    while not len(cluster.queue):
        step(cluster, rng)
    ticket = rng.choice(list(cluster.queue))
    why = cluster.dispatcher.why(ticket, cluster.now)
    assert why is not None  # a pass has placed all that could be placed
    remove_reason(cluster, ticket, why)
    if ticket.number in cluster.queue:
        then = cluster.dispatcher.why(ticket, cluster.now)
        assert then is not None
        assert then.reason is not why.reason


def remove_reason(cluster: ClusterInUse, ticket: Ticket, why: Rejection) -> None:
    """Change what the reason names, and serve the queue."""
    match why.reason:
        case Reason.QUOTA:
            del cluster.quotas[ticket.tenant]
        case Reason.OWN_RESERVATION:
            # A window that opens serves the first of the line, so open all of them.
            pool = cluster.reservations.of(ticket.line)
            blockers = [one for window in pool for one in cluster.reservations.blockers(window)]
            for number in {cluster.owner[one.id] for one in blockers}:
                cluster.release(number)
        case Reason.RESERVED:
            for line, _ in cluster.reservations:
                cluster.reserve(line, ())
        case Reason.CAPACITY | Reason.FRAGMENTED:  # others ahead would take the room
            for other in [one.number for one in cluster.queue if one != ticket]:
                cluster.release(other)
            geometry = cluster.shares.models(ticket.request)[0]
            cluster.cluster.add_node("added", geometry, 3 * ticket.count)
            cluster.shares.add_gpus(geometry, 3 * ticket.count)
        case _:
            raise AssertionError(why)
    cluster.dispatcher.room_appeared()
    cluster.settle()


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_equal_streams_give_equal_decisions(seed: int) -> None:
    first, second = (busy(seed)[0] for _ in range(2))
    assert first.served == second.served
    assert list(first.reservations) == list(second.reservations)
    assert [one.instances for one in first.running.values()] == [
        one.instances for one in second.running.values()
    ]


@settings(max_examples=EXAMPLES)
@given(SEEDS, st.sampled_from(["some", "all", "none"]))
def test_passes_decide_as_if_they_looked_at_every_line(seed: int, leases: str) -> None:
    """The reference looks at every line in every pass; what it decides is the same."""
    (fast, rng), (plain, same) = (
        busy(seed, leases, kinds) for kinds in ((Queue, Dispatcher), (PlainQueue, PlainDispatcher))
    )
    for _ in range(20):
        for cluster, dice in ((fast, rng), (plain, same)):
            step(cluster, dice, leases)
        assert fast.served == plain.served
        assert list(fast.reservations) == list(plain.reservations)
        assert [one.instances for one in fast.running.values()] == [
            one.instances for one in plain.running.values()
        ]
        assert [line.key for line in fast.queue.lines()] == [
            line.key for line in plain.queue.lines()
        ]


def test_a_flood_of_one_tenant_does_not_keep_a_window_from_another() -> None:
    cluster = ClusterInUse([(A100, 2)])
    for _ in range(3):
        cluster.ask("ana", "3g.40gb")
    for _ in range(40):
        cluster.ask("ana", "7g.80gb")
    number = cluster.ask("bob", "3g.40gb")
    assert number in cluster.running


def test_a_line_loses_its_reservation_when_another_uses_up_the_quota() -> None:
    cluster = ClusterInUse([(A100, 1)], quotas={"bob": 4})
    blocker = cluster.ask("ana", "7g.80gb")
    waiting = cluster.ask("bob", "3g.40gb")
    first = cluster.ask("bob", "2g.20gb", priority=1)
    line = cluster.queue.ticket(waiting).line
    placement = A100.placement("3g.40gb", 0)
    assert placement is not None
    cluster.reservations.set(line, [Window(0, placement.number, None)])
    cluster.end(blocker)
    assert first in cluster.running
    assert waiting in cluster.queue
    assert not cluster.reservations.of(line)
