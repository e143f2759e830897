"""When rehearsals are due, which finding wins, and when a choice ends."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise import Catalog, Request
from slicewise.engine.demand import DemandEstimate
from slicewise.engine.rehearsal import (
    LONGEST_WAIT,
    SOON,
    Finding,
    Interval,
    Rehearsal,
    Standing,
    due,
    still_holds,
    switch_back,
    winner,
)
from slicewise.policies.rehearsed import DEFAULT_CHOICE, Choice, forms_for

A100 = Catalog.builtin().find("A100-80GB").require()
SMALL, HALF, WHOLE = Request("1g.10gb"), Request("3g.40gb"), Request("7g.80gb")
NOTHING = Interval(0, 0, 0)


def demand_of(requests: int, mix: tuple[Request, ...] = (SMALL, HALF)) -> DemandEstimate:
    demand, rng = DemandEstimate(), random.Random(1)
    ask(demand, rng, requests, mix)
    return demand


def ask(
    demand: DemandEstimate, rng: random.Random, requests: int, mix: tuple[Request, ...]
) -> None:
    for _ in range(requests):
        demand.asked(demand.data().at + 1, rng.choice(mix))
        demand.ended("1g.10gb", 100.0)


def time_choice() -> Choice:
    return next(c for c in forms_for({SMALL: 0.5, HALF: 0.5}, [A100]) if c.form == "time")


def found(
    name: str,
    fewer: tuple[float, float, float] = (0, 0, 0),
    slices: float = 0,
    than_used: tuple[float, float, float] = (0, 0, 0),
) -> Finding:
    """Return a finding with these leads: value, low and high."""
    return Finding(
        Choice(name),
        30,
        NOTHING,
        NOTHING,
        Interval(*fewer),
        Interval(slices, slices - 1, slices + 1),
        Interval(*than_used),
    )


SAFE = found("least-lost")


# When it is due


def test_not_before_enough_is_known() -> None:
    assert not due(demand_of(299), Standing())
    assert due(demand_of(300), Standing())
    no_ends = DemandEstimate()
    for at in range(400):
        no_ends.asked(at, SMALL)
    assert not due(no_ends, Standing())
    at_once = DemandEstimate()  # at what rate is not known
    for _ in range(400):
        at_once.asked(5, SMALL)
        at_once.ended("1g.10gb", 100.0)
    assert not due(at_once, Standing())


def test_intervals_double_while_the_demand_holds() -> None:
    demand, rng, standing = DemandEstimate(), random.Random(1), Standing()
    times = []
    for _ in range(1500):
        ask(demand, rng, 20, (SMALL, HALF))
        if due(demand, standing):
            times.append(demand.requests)
            standing = Standing(DEFAULT_CHOICE, demand.requests, demand.changes, rehearsed=True)
    assert demand.changes == 0
    assert times[:6] == [300, 600, 1200, 2400, 4800, 9600]
    assert {after - before for before, after in pairwise(times[5:])} == {LONGEST_WAIT}


def test_soon_after_a_change_and_after_a_switch_back() -> None:
    demand, rng = demand_of(5000), random.Random(2)
    standing = Standing(DEFAULT_CHOICE, demand.requests, 0, rehearsed=True)
    ask(demand, rng, 299, (SMALL, WHOLE))
    assert demand.changes
    assert not due(demand, standing)
    ask(demand, rng, 500, (SMALL, WHOLE))  # the first windows still hold some of the old demand
    assert due(demand, standing)
    demand = demand_of(5000)
    standing = Standing(DEFAULT_CHOICE, demand.requests, 0)
    ask(demand, rng, SOON - 1, (SMALL, HALF))
    assert not due(demand, standing)
    ask(demand, rng, 1, (SMALL, HALF))
    assert due(demand, standing)


# The rule


def test_least_lost_stays_unless_the_lead_is_certain() -> None:
    assert winner([SAFE], DEFAULT_CHOICE)[0] is SAFE
    unsure, sure = found("a", (2, -0.1, 4)), found("b", (1, 0.1, 2))
    assert winner([SAFE, unsure], DEFAULT_CHOICE)[0] is SAFE
    assert winner([SAFE, unsure, sure], DEFAULT_CHOICE)[0] is sure
    assert "surely" in winner([SAFE, unsure, sure], DEFAULT_CHOICE)[1]


def test_a_winner_rejects_no_more_slices() -> None:
    costly, fine = found("a", (9, 8, 10), slices=-0.001), found("b", (1, 0.5, 1.5), slices=0)
    assert winner([SAFE, costly], DEFAULT_CHOICE)[0] is SAFE
    assert winner([SAFE, costly, fine], DEFAULT_CHOICE)[0] is fine
    assert winner([SAFE, costly, fine], costly.choice)[0] is fine


def test_the_one_in_force_stays_unless_another_is_surely_better() -> None:
    used = found("used", (1, 0.5, 1.5))
    near = found("near", (2, 1, 3), than_used=(1, -0.1, 2.1))
    far = found("far", (2, 1, 3), than_used=(1, 0.1, 1.9))
    assert winner([SAFE, used, near], used.choice)[0] is used
    assert winner([SAFE, used, near], used.choice)[1] == "used is in use, and none is surely better"
    assert winner([SAFE, used, near], DEFAULT_CHOICE)[0] is near
    assert winner([SAFE, used, far], used.choice)[0] is far
    assert winner([SAFE, far, used], far.choice)[0] is far


def test_the_one_in_force_was_surely_better_and_may_stay_while_it_seems_so() -> None:
    seems, no_longer = found("used", (1, -0.5, 2.5)), found("used", (-1, -2.5, 0.5))
    assert winner([SAFE, seems], seems.choice)[0] is seems
    assert winner([SAFE, no_longer], seems.choice)[0] is SAFE
    assert winner([SAFE, SAFE], DEFAULT_CHOICE)[0] is SAFE


intervals = st.tuples(st.floats(-1, 1), st.floats(0, 1)).map(
    lambda pair: (pair[0], pair[0] - pair[1], pair[0] + pair[1])
)


@given(
    st.lists(st.tuples(intervals, st.floats(-1, 1), intervals), max_size=6),
    st.integers(0, 6),
)
def test_whatever_is_found_the_winner_seems_no_worse_than_least_lost(
    others: list[tuple[tuple[float, float, float], float, tuple[float, float, float]]], used: int
) -> None:
    findings = [SAFE, *(found(f"form-{n}", *each) for n, each in enumerate(others))]
    in_force = findings[used % len(findings)].choice
    best, _ = winner(findings, in_force)
    assert best in findings
    assert best.fewer_requests.value >= 0 <= best.fewer_slices.value
    if best is not SAFE and best.choice != in_force:
        assert best.fewer_requests.low > 0


# Its end


def test_a_change_or_something_new_ends_a_choice_at_once() -> None:
    demand, choice = demand_of(2000), time_choice()
    standing = Standing(choice, 2000, 0, rehearsed=True)
    assert switch_back(demand, standing, SMALL, [A100]) is None
    back = switch_back(demand, standing, WHOLE, [A100])
    assert back == (
        Standing(DEFAULT_CHOICE, 2000, 0),
        "7g.80gb was not asked for when it was rehearsed",
    )
    ask(demand, random.Random(1), 300, (SMALL, SMALL, SMALL, HALF))
    back = switch_back(demand, standing, SMALL, [A100])
    assert back is not None
    assert back[0] == Standing(DEFAULT_CHOICE, 2300, 1)
    assert "changed" in back[1]
    assert switch_back(demand, back[0], WHOLE, [A100]) is None  # least-lost serves all


@pytest.mark.parametrize("stale", ["change", "new request", "later choice", "future"])
def test_a_stale_finding_is_harmless(stale: str) -> None:
    demand, choice = demand_of(2000), time_choice()
    made = Rehearsal(Standing(choice, 2000, 0, rehearsed=True), "better", 0.85, ())
    standing = Standing()
    assert still_holds(made, demand, standing, [A100])
    ask(demand, random.Random(3), 50, (SMALL, HALF))
    assert still_holds(made, demand, standing, [A100])
    match stale:
        case "change":
            ask(demand, random.Random(3), 300, (SMALL, SMALL, SMALL, HALF))
            assert demand.changes
        case "new request":
            demand.asked(demand.data().at, WHOLE)
        case "later choice":
            standing = Standing(DEFAULT_CHOICE, 2040, 0)
        case _:
            demand = demand_of(1000)
    assert not still_holds(made, demand, standing, [A100])
