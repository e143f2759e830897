"""The estimate of what is asked for: exact, deterministic, and quick to see a change."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Need, Request
from slicewise.engine.demand import FEW, WINDOW, DemandData, DemandEstimate, Stay

KINDS = tuple(Request(name) for name in "abcdef")
UNIFORM = (1, 1, 1, 1, 1, 1)
SMALL = (1, 2, 2, 4, 5, 6)


def feed(
    demand: DemandEstimate,
    rng: random.Random,
    weights: tuple[float, ...],
    count: int,
    gap: float = 1.0,
) -> None:
    """Ask for so many requests of a mix, each some time after the one before."""
    begin = demand.data().at
    for number, request in enumerate(rng.choices(KINDS, weights, k=count)):
        demand.asked(begin + gap * (number + 1), request)


def test_nothing_is_known_at_first() -> None:
    demand = DemandEstimate()
    assert (demand.requests, demand.changes, demand.rate, demand.running) == (0, 0, 0.0, 0.0)
    assert (demand.shares, demand.asked_for, demand.stays, demand.mean_lifetime) == ({}, (), (), 0)
    assert demand.data() == DemandData()


def test_it_finds_the_mix_the_rate_and_the_lifetimes() -> None:
    demand, rng = DemandEstimate(), random.Random(1)
    for at in range(6000):
        demand.asked(at / 4, rng.choices(KINDS, SMALL)[0])
        demand.ended("a", rng.uniform(0, 100), 50.0)
    total = sum(SMALL)
    for kind, weight in zip(KINDS, SMALL, strict=True):
        assert demand.shares[kind] == pytest.approx(weight / total, abs=0.05)
    assert demand.rate == pytest.approx(4, rel=1e-4)
    assert demand.mean_lifetime == pytest.approx(50, rel=0.1)
    assert demand.running == pytest.approx(200, rel=0.1)
    assert (demand.requests, demand.steady_for, demand.changes) == (6000, 6000, 0)


def test_rates_do_not_depend_on_the_unit_of_time() -> None:
    one, other = DemandEstimate(), DemandEstimate()
    feed(one, random.Random(2), UNIFORM, 2000, gap=1)
    feed(other, random.Random(2), UNIFORM, 2000, gap=3600)
    assert one.shares == other.shares
    assert one.rate == pytest.approx(3600 * other.rate)


def test_a_clock_that_goes_back_adds_no_time() -> None:
    demand = DemandEstimate()
    for at in (10, 20, 5, 30):
        demand.asked(at, KINDS[0])
    # Gaps of 10, 0 and 10 between four requests; later ones weigh a little more.
    assert demand.rate == pytest.approx(4 / 20, rel=0.01)


def test_a_request_for_many_counts_as_many() -> None:
    at_once, singly = DemandEstimate(), DemandEstimate()
    at_once.asked(0, KINDS[0])
    at_once.asked(1, KINDS[1], count=250)
    singly.asked(0, KINDS[0])
    for _ in range(250):
        singly.asked(1, KINDS[1])
    assert at_once.requests == singly.requests == 251
    assert at_once.shares[KINDS[1]] == pytest.approx(singly.shares[KINDS[1]])


def test_large_requests_are_no_change_of_the_mix() -> None:
    """A tenant that asks for 64 at a time is one observation, not 64 that agree."""
    demand, rng = DemandEstimate(), random.Random(3)
    for at in range(400):
        demand.asked(at, rng.choices(KINDS, UNIFORM)[0], count=64)
    assert demand.changes == 0


def test_chance_is_no_change() -> None:
    for seed, weights in enumerate((UNIFORM, SMALL, (1, 2, 10, 100, 400, 487))):
        demand = DemandEstimate()
        feed(demand, random.Random(seed), weights, 12_000)
        assert demand.changes == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_change_is_seen_and_what_was_before_it_forgotten(seed: int) -> None:
    demand, rng = DemandEstimate(), random.Random(seed)
    feed(demand, rng, UNIFORM, 5000)
    feed(demand, rng, SMALL, 400)
    assert demand.changes == 1
    assert demand.steady_for < 400
    feed(demand, rng, SMALL, 600)
    assert demand.changes == 1
    assert demand.shares[KINDS[5]] == pytest.approx(0.3, abs=0.06)


def test_few_requests_are_no_change() -> None:
    demand = DemandEstimate()
    feed(demand, random.Random(1), (1, 0, 0, 0, 0, 0), FEW // 2)
    feed(demand, random.Random(1), (0, 1, 0, 0, 0, 0), FEW // 2 - 20)
    assert demand.changes == 0
    feed(demand, random.Random(1), (0, 1, 0, 0, 0, 0), 40)
    assert demand.changes == 1


def test_a_single_kind_of_request_never_changes() -> None:
    demand = DemandEstimate()
    feed(demand, random.Random(1), (1, 0, 0, 0, 0, 0), 2000)
    assert demand.changes == 0


def test_a_rare_request_stays_asked_for_and_is_forgotten_in_the_end() -> None:
    demand = DemandEstimate()
    demand.asked(0, KINDS[5])
    feed(demand, random.Random(1), (1, 1, 1, 1, 1, 0), 10 * WINDOW)
    assert demand.asked_for[0] == KINDS[5]
    assert 0 < demand.shares[KINDS[5]] < 1e-3
    for _ in range(45):
        demand.asked(demand.data().at, KINDS[0], count=WINDOW)
    assert KINDS[5] not in demand.asked_for
    assert KINDS[0] in demand.asked_for


def test_memory_is_bounded() -> None:
    """Tenants choose what they ask for: what was asked for longest ago is forgotten."""
    demand = DemandEstimate()
    for number in range(1000):
        demand.asked(number, Request(Need(0, float(number))))
        demand.ended(f"p{number}", 1.0)
        demand.asked(number, KINDS[0])
    assert len(demand.asked_for) == 64
    assert KINDS[0] in demand.asked_for
    for _ in range(3000):
        demand.ended("a", 1.0)
    assert len(demand.stays) == 1000


def test_a_large_cluster_has_a_longer_window() -> None:
    demand, rng = DemandEstimate(), random.Random(4)
    for at in range(3000):  # 20,000 run at once
        demand.ended("a", 20_000.0)
        demand.asked(at, rng.choices(KINDS, UNIFORM)[0])
    small = DemandEstimate()
    feed(small, random.Random(4), UNIFORM, 3000)
    assert demand.running == pytest.approx(20_000, rel=0.01)
    assert small.data().windows.long == pytest.approx(WINDOW, rel=0.06)
    assert demand.data().windows.long > 2.5 * WINDOW


def test_lifetimes_of_a_profile_and_of_all_if_few_are_known() -> None:
    demand = DemandEstimate()
    for number in range(40):
        demand.ended("a", float(number), stated=number + 1.0)
    demand.ended("b", -1.0)
    assert demand.stays_of(["a"])[0] == Stay("a", 0.0, 1.0)
    assert len(demand.stays_of(["a"])) == 40
    assert demand.stays_of(["b"]) == demand.stays
    assert demand.stays_of(["b"], least=1) == (Stay("b", 0.0, None),)  # no negative lifetimes


calls = st.lists(
    st.one_of(
        st.tuples(
            st.just("asked"),
            st.floats(0, 1e6),
            st.sampled_from([*KINDS, Request(Need(2, 15.5), ("A100-80GB",))]),
            st.integers(1, 400),
        ),
        st.tuples(
            st.just("ended"),
            st.sampled_from(["a", "b"]),
            st.floats(0, 1e6),
            st.none() | st.floats(0, 1e6),
        ),
    ),
    max_size=60,
)


@given(before=calls, after=calls)
@settings(max_examples=60)
def test_the_same_calls_give_the_same_estimate_across_a_restart(
    before: list[tuple[object, ...]], after: list[tuple[object, ...]]
) -> None:
    """Also as JSON, in which a snapshot keeps it; and the data do not change with the estimate."""
    straight, restarted = DemandEstimate(), DemandEstimate()
    for name, *arguments in before:
        getattr(straight, str(name))(*arguments)
        getattr(restarted, str(name))(*arguments)
    data = restarted.data()
    stored = msgspec.json.encode(data)
    restarted = DemandEstimate.of(msgspec.json.decode(stored, type=DemandData))
    for name, *arguments in after:
        getattr(straight, str(name))(*arguments)
        getattr(restarted, str(name))(*arguments)
    assert straight.data() == restarted.data()
    assert msgspec.json.encode(data) == stored


@given(calls)
@settings(max_examples=60)
def test_shares_are_shares(made: list[tuple[object, ...]]) -> None:
    demand, asked = DemandEstimate(), Counter[object]()
    for name, *arguments in made:
        getattr(demand, str(name))(*arguments)
        if name == "asked":
            asked[arguments[1]] += int(str(arguments[2]))
    assert set(demand.shares) == set(demand.asked_for) == set(asked)
    assert demand.requests == asked.total()
    assert math.isclose(math.fsum(demand.shares.values()), 1) or not asked
    assert all(share >= 0 for share in demand.shares.values())
