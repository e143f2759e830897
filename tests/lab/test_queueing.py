"""The queueing experiment: the same requests for all, counts that add up, exact false waits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from slicewise import Cluster, Geometry, Request, Scheduler, SlicewiseError, load_geometry, policy
from slicewise.core.errors import UnknownNameError
from slicewise.engine.queue import Ticket
from slicewise.engine.reclaim import ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.lab.disciplines import WAYS, InLines, InRoom, InUse, Leases, way
from slicewise.lab.mix import parse_mix
from slicewise.lab.queueing import (
    CLASS_COLUMNS,
    MOST_STRETCH,
    PERCENTILES,
    RUN_COLUMNS,
    Counts,
    Queueing,
    fair_service,
    groups,
    jain,
    percentile,
    queueing_rows,
)
from slicewise.lab.reclaiming import InLinesWithReclaim
from slicewise.lab.runner import Outcome, run_experiment
from slicewise.lab.tenants import SCENARIOS, Asked, Scenario, Tenant, draw, scenario
from slicewise.lab.waiting_room import Discipline
from slicewise.lab.workload import Ints


def ignore(units: int) -> None:
    """No progress is shown."""


def small(name: str, geometry: Geometry, **settings: Any) -> Queueing:
    """A short experiment on few GPUs."""
    chosen = scenario(name, geometry)
    given = {"load": 1.0, "lifetimes": 8, "warmup": 1, **settings}
    return Queueing((chosen.mix,), (policy("least-lost"),), 8, 2, 3, scenarios=(chosen,), **given)


def classes(experiment: Queueing, sums: Ints) -> Ints:
    """By tenant, profile and `CLASS_COLUMNS`."""
    chosen = experiment.scenarios[0]
    shape = len(chosen.tenants), len(chosen.profiles), len(CLASS_COLUMNS)
    return sums[-math.prod(shape) :].reshape(shape)


# Arrivals


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("model", ["A100-80GB", "A30-24GB"])
def test_a_scenario_offers_its_load(name: str, model: str) -> None:
    """Every tenant asks for its part of the slices, and all together for the load."""
    chosen, gpus = scenario(name, load_geometry(model)), 100
    longest, slots = chosen.longest_lifetime(gpus, 0.9), 40_000
    offered: Counter[int] = Counter()
    for asked in (asked for slot in draw(chosen, 1, 0, slots, longest, 3.0) for asked in slot):
        assert chosen.profiles[asked.kind] in chosen.tenants[asked.tenant].mix.profiles
        assert 1 <= asked.lifetime <= longest
        assert 1 <= asked.stretch <= 3
        offered[asked.tenant] += chosen.profiles[asked.kind].size * asked.lifetime
    capacity = slots * gpus * chosen.geometry.slices
    assert offered.total() / capacity == pytest.approx(0.9, rel=0.12)
    whole = sum(tenant.load for tenant in chosen.tenants)
    for number, tenant in enumerate(chosen.tenants):
        part = offered[number] / offered.total()
        assert part == pytest.approx(tenant.load / whole, rel=0.25)
    assert set(chosen.affected) < {tenant.name for tenant in chosen.tenants}


def test_bursts_arrive_in_one_slot_and_runs_differ(a100: Geometry) -> None:
    mix = parse_mix("uniform", a100)
    tenants = (Tenant("a", 1, mix, burst=7), Tenant("b", 1, mix))
    chosen = Scenario("bursts", a100, tenants)
    stream = draw(chosen, 1, 0, 500, 30, 2.0)
    for slot in stream:
        assert [asked.tenant for asked in slot] in ([0] * 7, [1])
    numbers = [asked.number for slot in stream for asked in slot]
    assert numbers == list(range(len(numbers)))
    assert stream == draw(chosen, 1, 0, 500, 30, 2.0)
    assert stream != draw(chosen, 1, 1, 500, 30, 2.0)
    longer = draw(chosen, 1, 0, 500, 30, 9.0)
    assert [a._replace(stretch=1) for slot in stream for a in slot] == [
        a._replace(stretch=1) for slot in longer for a in slot
    ], "leases do not change arrivals"


def test_unknown_names_suggest_close_ones(a100: Geometry) -> None:
    with pytest.raises(UnknownNameError, match="unknown scenario 'flod'; did you mean flood"):
        scenario("flod", a100)
    with pytest.raises(
        UnknownNameError, match="unknown discipline 'fair_exact'; did you mean fair-exact"
    ):
        way("fair_exact")


def test_invalid_settings_are_rejected(a100: Geometry) -> None:
    for settings, problem in (
        ({"oracle": True}, "the oracle does not queue"),
        ({"patience": -1}, r"patience -1 is not in 0\.\.1000000"),
        ({"patience": math.nan}, "patience nan is not in"),
        ({"patience": math.inf}, "at load 1 a queue grows forever"),
        ({"ways": ()}, "needs disciplines, each of them once"),
        ({"ways": (WAYS["fair"],) * 2}, "needs disciplines, each of them once"),
        ({"reserve_share": 2.0}, "share of reserved GPUs must be 0 to 1"),
    ):
        with pytest.raises(SlicewiseError, match=problem):
            small("even", a100, **settings)
    for load, burst in ((0.0, 1), (1.0, 0)):
        with pytest.raises(SlicewiseError, match="tenant 'x' needs a load above 0"):
            Tenant("x", load, parse_mix("uniform", a100), burst=burst)
    with pytest.raises(SlicewiseError, match="scenario 's' needs a tenant without bursts"):
        Scenario("s", a100, (Tenant("x", 1.0, parse_mix("uniform", a100), burst=2),))


# Waiting


def test_without_patience_nothing_waits_and_all_disciplines_agree(a100: Geometry) -> None:
    experiment = small("even", a100, patience=0.0)
    sums = [experiment.simulate(0, e, 0, ignore) for e in experiment.entrants(0)]
    for found in sums:
        assert found.tolist() == sums[0].tolist()
    placed, waited, wait, gave_up = classes(experiment, sums[0]).sum(axis=(0, 1)).tolist()
    assert placed > 0
    assert gave_up > 0
    assert waited == wait == 0


@pytest.mark.parametrize("name", ["even", "starving", "weights"])
def test_every_request_is_counted(name: str, a100: Geometry) -> None:
    """Every request was placed, gave up or still waits, and slices are counted slot by slot."""
    experiment = small(name, a100, warmup=0, patience=0.5)
    longest = experiment.longest_lifetime(0)
    chosen = experiment.scenarios[0]
    slots = experiment.units(0)
    stream = draw(chosen, experiment.seed, 0, slots, longest, MOST_STRETCH)
    arrived = sum(map(len, stream))
    patience = round(0.5 * experiment.mean_lifetime(0))
    for entrant, each in enumerate(experiment.ways):
        in_use = experiment.in_use(0, entrant)
        counts = in_use.watcher = Counts(chosen)
        busy = waiting = 0
        for now, arrivals in enumerate(stream):
            before = in_use.work
            in_use.slot(now, arrivals)
            counts.slot_ends(in_use, before)
            assert sum(in_use.slices) == in_use.scheduler.cluster.occupied_slices
            assert in_use.waiting_kinds.total() == len(in_use.waiting)
            assert all(now - asked.slot < patience for asked in unplaced(in_use))
            busy += sum(in_use.slices)
            waiting += len(in_use.waiting)
        sums = counts.sums()
        run = dict(zip(RUN_COLUMNS, sums.tolist(), strict=False))
        assert (run["slots"], run["occupied"], run["waiting"]) == (slots, busy, waiting), each
        placed, waited, wait, gave_up = classes(experiment, sums).sum(axis=(0, 1)).tolist()
        assert arrived == placed + gave_up + len(unplaced(in_use))
        assert 0 < waited <= placed + gave_up + len(in_use.waiting)
        assert gave_up > 0
        assert (run["lost"] > 0) == (in_use.lost > 0)
        if not each.reclaim:  # what was reclaimed waits again
            assert run["lost"] == 0
            # Little's law, to the slot: the lengths of the queue add up to the waits.
            rest = waiting - wait - gave_up * patience
            assert 0 <= rest <= len(in_use.waiting) * patience


def unplaced(in_use: InUse) -> list[Asked]:
    """The waiting requests that were not placed before."""
    return [asked for asked in in_use.waiting.values() if asked.number >= 0]


def open_by_search(in_use: InUse) -> int:
    """How many wait although a window is open to them, GPU by GPU and request by request."""
    cluster = in_use.scheduler.cluster

    def fits(gpu: int, want: Request) -> bool:
        state = cluster.state(gpu)
        return any(state.feasible_starts(p) for _, p in want.candidates(state.geometry))

    if isinstance(in_use, InRoom):
        return sum(
            any(fits(gpu, ticket.request) for gpu in range(cluster.gpus)) for ticket in in_use.room
        )
    assert isinstance(in_use, InLines)
    bound = {w.gpu: (line, w) for line, pool in in_use.reservations for w in pool}

    def may_use(ticket: Ticket, gpu: int) -> bool:
        if gpu not in bound:
            return fits(gpu, ticket.request)
        line, window = bound[gpu]
        if line == ticket.line and in_use.queue.position(ticket.number) == 0:
            return fits(gpu, ticket.request)
        ends = math.inf if ticket.lease is None else in_use.now + ticket.lease
        if window.opens is not None and ends <= window.opens:
            return fits(gpu, ticket.request)
        shown = cluster.states[cluster.state_of[gpu]]
        return gpu in cluster.members[cluster.state_of[gpu]] and any(
            shown.feasible_starts(p) for _, p in ticket.request.candidates(shown.geometry)
        )

    return sum(any(may_use(ticket, gpu) for gpu in range(cluster.gpus)) for ticket in in_use.queue)


@pytest.mark.parametrize("entrant", range(len(WAYS)), ids=list(WAYS))
@pytest.mark.parametrize("name", ["flood", "starving"])
def test_false_waits_are_those_that_a_search_finds(name: str, entrant: int, a100: Geometry) -> None:
    experiment = small(name, a100, reserve_after=0.02, reserve_share=0.5, lifetimes=4)
    in_use = experiment.in_use(0, entrant)
    longest = experiment.longest_lifetime(0)
    stream = draw(experiment.scenarios[0], 5, 0, experiment.units(0), longest, MOST_STRETCH)
    found = reserved = 0
    for now, arrivals in enumerate(stream):
        in_use.slot(now, arrivals)
        falsely = in_use.open_windows()
        assert falsely == open_by_search(in_use), now
        found += falsely
        reserved += len(in_use.reservations) if isinstance(in_use, InLines) else 0
    if isinstance(in_use, InLines):
        assert found == 0, "the fair queue is work-conserving"
        assert reserved > 0, "a run without reservations would show little"
    elif WAYS["unlimited"] is not experiment.ways[entrant]:
        assert found > 0


def test_a_window_kept_for_a_waiting_request_is_seen(a100: Geometry) -> None:
    """The search for false waits is no tautology: here the queue is not served."""
    chosen = scenario("starving", a100)
    scheduler = Scheduler(Cluster.of(a100, 1), "least-lost")
    in_use = InLines(Leases.EXACT, ReservationRules(0.0, 1.0), scheduler, chosen, None, Ignore())
    kinds = [profile.name for profile in chosen.profiles]
    small_one, whole = kinds.index("1g.10gb"), kinds.index("7g.80gb")
    in_use.slot(0, [Asked(0, 0, 1, small_one, 20, 1.0)])
    in_use.slot(1, [Asked(1, 1, 0, whole, 5, 1.0)])
    in_use.slot(2, [Asked(2, 2, 1, small_one, 30, 1.0)])
    assert not in_use.waiting_kinds[small_one], "no window was reserved yet"
    in_use.slot(3, ())
    assert len(in_use.reservations) == 1
    in_use.slot(4, [Asked(3, 4, 1, small_one, 40, 1.0)])
    assert in_use.waiting_kinds == {whole: 1, small_one: 1}
    assert in_use.open_windows() == open_by_search(in_use) == 0, "it would be too long"
    for asked in (Asked(4, 4, 1, small_one, 20, 1.0), Asked(5, 4, 1, small_one, 60, 1.0)):
        in_use.waiting_kinds[small_one] += 1
        in_use.queue.enter(in_use._ticket(asked))
    assert in_use.open_windows() == open_by_search(in_use) == 1
    for instance in list(scheduler.cluster.instances()):
        scheduler.release(instance)
    assert in_use.open_windows() == open_by_search(in_use) == 2, "its own, and the short one"


def test_reclaim_by_hand(a100: Geometry) -> None:
    """Notice, end, the claimed window, a rest, and the request that waits again."""
    tenants = (
        Tenant("ana", 1, parse_mix("7g.80gb=1", a100), guarantee=0.5),
        Tenant("bob", 1, parse_mix("3g.40gb=1", a100)),
    )
    chosen = Scenario("two", a100, tenants)
    whole, half = ([p.name for p in chosen.profiles].index(n) for n in ("7g.80gb", "3g.40gb"))
    counts = Counts(chosen)
    scheduler = Scheduler(Cluster.of(a100, 2), "least-lost")
    never = ReservationRules(after=math.inf)
    rules = ReclaimRules(enabled=True, grace=2, min_run=3, notice=2, first_rest=4)
    in_use = InLinesWithReclaim(rules, Leases.NONE, never, scheduler, chosen, 50, counts)
    in_use.slot(0, [Asked(number, 0, 1, half, 40, 1.0) for number in range(4)])
    in_use.slot(1, [Asked(4, 1, 0, whole, 8, 1.0), Asked(5, 1, 0, whole, 8, 1.0)])
    in_use.slot(2, ())
    assert len(in_use.reservations) == 0, "it has not waited for the grace yet"
    in_use.slot(3, ())
    ((line, (window,)),) = in_use.reservations
    assert (line.tenant, window.claimed, window.opens) == ("ana", True, 5)
    assert scheduler.cluster.instance_count == 4, "they have notice"
    in_use.slot(4, ())
    in_use.slot(5, ())
    assert in_use.lost == 2 * 5 * 4, "two instances of 4 slices ran for 5 slots"
    assert in_use.slices == [8, 8]
    assert list(in_use.waiting) == [5], "the guarantee covers one GPU"
    assert len(in_use.reservations) == 0
    for slot in range(6, 13):
        in_use.slot(slot, ())
    assert sorted(in_use.waiting) == [-2, -1, 5], "after the rest they wait again"
    assert [in_use.queue.ticket(n).entered for n in (-2, -1)] == [0, 0]
    in_use.slot(13, ())
    assert in_use.slices[0] == 8, "its instance ended, and the next one is within the guarantee"
    assert 5 not in in_use.waiting
    for slot in range(14, 90):
        in_use.slot(slot, ())
    assert not in_use.waiting
    assert in_use.slices == [0, 0]
    shape = len(tenants), 2, len(CLASS_COLUMNS)
    placed = counts.sums()[-math.prod(shape) :].reshape(shape)[..., 0]
    assert placed.sum() == 6, "those that make way are counted once"


def test_a_claim_ends_when_the_window_is_free_otherwise(a100: Geometry) -> None:
    """An instance that has notice may stay if its window is not needed any more."""
    tenants = (
        Tenant("ana", 1, parse_mix("7g.80gb=1", a100), guarantee=1.0),
        Tenant("bob", 1, parse_mix("3g.40gb=1", a100)),
    )
    chosen = Scenario("two", a100, tenants)
    whole, half = ([p.name for p in chosen.profiles].index(n) for n in ("7g.80gb", "3g.40gb"))
    scheduler = Scheduler(Cluster.of(a100, 2), "least-lost")
    never = ReservationRules(after=math.inf)
    rules = ReclaimRules(enabled=True, grace=0, min_run=0, notice=5, first_rest=1)
    in_use = InLinesWithReclaim(rules, Leases.NONE, never, scheduler, chosen, 3, Ignore())
    in_use.slot(0, [Asked(number, 0, 1, half, 6, 1.0) for number in range(3)])
    in_use.slot(1, [Asked(3, 1, 1, half, 30, 1.0), Asked(4, 1, 0, whole, 9, 1.0)])
    assert len(in_use.reservations) == 1
    for slot in range(2, 12):
        in_use.slot(slot, ())
    assert not in_use.waiting, "the request gave up before the notice was over"
    assert len(in_use.reservations) == 0
    assert in_use.lost == 0
    assert in_use.slices == [0, 4], "what had notice ran on"


class Ignore:
    """Watches nothing."""

    def placed(self, asked: Asked, wait: int) -> None:
        """It was placed."""

    def gave_up(self, asked: Asked, wait: int) -> None:
        """It gave up."""


def test_one_line_by_hand(a100: Geometry) -> None:
    """A large request at the head blocks the small ones, unless they may pass it."""
    tenants = (
        Tenant("ana", 1, parse_mix("7g.80gb=1", a100)),
        Tenant("bob", 1, parse_mix("1g.10gb=1", a100)),
    )
    chosen = Scenario("two", a100, tenants)
    whole, one = ([p.name for p in chosen.profiles].index(name) for name in ("7g.80gb", "1g.10gb"))
    left = {}
    for name, discipline in {"fifo": Discipline(), "any": Discipline(9, 9)}.items():
        counts = Counts(chosen)
        scheduler = Scheduler(Cluster.of(a100, 1), "mfi")
        in_use = InRoom(discipline, scheduler, chosen, 3, counts)
        for slot, (tenant, kind) in enumerate([(1, one), (0, whole), (1, one)]):
            in_use.slot(slot, [Asked(slot, slot, tenant, kind, 9, 1.0)])
        left[name] = in_use.open_windows(), list(in_use.waiting)
        in_use.slot(3, ())
        in_use.slot(4, ())
        assert not in_use.waiting, "the large one gave up, and the other was placed"
        waits = {"fifo": (2, 1, 2, 0), "any": (2, 0, 0, 0)}[name]
        shape = len(tenants), 2, len(CLASS_COLUMNS)
        found = counts.sums()[-math.prod(shape) :].reshape(shape)
        assert tuple(found[1, one].tolist()) == waits
        assert tuple(found[0, whole].tolist()) == (0, 1, 0, 1)
    assert left == {"fifo": (1, [1, 2]), "any": (0, [1])}


# Rows


def test_rows_hold_every_group(a100: Geometry) -> None:
    experiment = small("starving", a100, ways=(WAYS["fifo"], WAYS["fair"]))
    rows = queueing_rows(run_experiment(experiment, 1, ignore))
    assert rows == queueing_rows(run_experiment(experiment, 2, ignore)), (
        "with any number of workers"
    )
    chosen = experiment.scenarios[0]
    named = [(group.kind, group.name) for group in groups(chosen)]
    for place, discipline in enumerate(("fifo", "fair")):
        mine = rows[place * len(named) : (place + 1) * len(named)]
        assert [(row["group"], row["name"]) for row in mine] == named
        assert {row["discipline"] for row in mine} == {discipline}
        everything, affected = mine[0], mine[1]
        for figure in ("gave_up_share", "mean_wait_lifetimes", "utilization_percent", "fairness"):
            interval: Any = everything[f"{figure}_ci95"]
            assert interval[0] <= everything[figure] <= interval[1]
        assert affected["utilization_percent"] is None
        by_profile = {
            row["name"]: row["gave_up_share"] for row in mine if row["group"] == "profile"
        }
        worst = everything["worst_profile"]
        assert everything["worst_profile_gave_up_share"] == by_profile[worst]
        assert by_profile[worst] == max(by_profile.values())  # type: ignore[type-var]
        waits = [everything[f"wait_p{percent}_lifetimes"] for percent in PERCENTILES]
        assert waits == sorted(waits)  # type: ignore[type-var]
        assert everything["longest_wait_lifetimes"] >= waits[-1]  # type: ignore[operator]
    fifo, fair = rows[1], rows[len(named) + 1]
    assert fair["mean_wait_lifetimes"] < fifo["mean_wait_lifetimes"]  # type: ignore[operator]
    assert rows[0]["false_wait_share"] > 0.1  # type: ignore[operator]
    assert rows[len(named)]["false_wait_share"] == 0


def test_waiting_for_ever_has_no_patience_in_its_rows(a100: Geometry) -> None:
    experiment = small(
        "even", a100, ways=(WAYS["fair"],), load=0.7, patience=math.inf, reserve_after=math.inf
    )
    row = queueing_rows(run_experiment(experiment, 1, ignore))[0]
    assert row["patience_lifetimes"] is None
    assert row["reserve_after_lifetimes"] is None
    assert row["gave_up_share"] == 0


def test_an_interruption_before_the_first_run_is_said(a100: Geometry) -> None:
    with pytest.raises(SlicewiseError, match="before every discipline had finished a run"):
        queueing_rows(Outcome(small("even", a100), interrupted=True))


def test_fair_service_fills_the_smallest_demands_first() -> None:
    for demand, weights, capacity, expected in (
        ([2, 3], [1, 1], 9, [2, 3]),
        ([2, 8], [1, 1], 8, [2, 6]),
        ([9, 9], [3, 1], 8, [6, 2]),
        ([1, 9, 9], [1, 3, 1], 9, [1, 6, 2]),
        ([0, 5], [1, 1], 4, [0, 4]),
    ):
        found = fair_service(np.array(demand, float), [float(w) for w in weights], capacity)
        assert found.tolist() == pytest.approx(expected)


def test_jains_index_is_one_for_equal_and_one_in_n_for_one() -> None:
    assert jain(np.array([0.5, 0.5, 0.5])) == pytest.approx(1)
    assert jain(np.array([0.0, 1.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert jain(np.zeros(3)) == 1


def test_percentiles_are_values_that_occur() -> None:
    assert percentile(Counter(), 50) == 0
    assert percentile(Counter({3: 1}), 99) == 3
    counts = Counter({0: 95, 7: 4, 20: 1})
    assert [percentile(counts, percent) for percent in (50, 95, 96, 99, 100)] == [0, 0, 7, 7, 20]
