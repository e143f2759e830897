"""A budget is never exceeded, and is spent on the most valuable rescues first."""

from __future__ import annotations

import pytest

from slicewise.engine.move_budget import CHEAPEST, DEAREST, LONGEST_PLAN, MoveBudget, worth


def test_a_rescue_is_worth_less_if_larger_or_if_the_cluster_is_fuller() -> None:
    for free in (10, 30, 100, 400):
        by_size = [worth(size, 8, free, 800) for size in (1, 2, 4, 8)]
        assert by_size == sorted(by_size, reverse=True)
        assert by_size[0] < 1
    for size in (1, 2, 4, 8):
        by_room = [worth(size, 8, free, 800) for free in (8, 20, 40, 80, 160)]
        assert by_room == sorted(by_room)
    assert worth(8, 8, 8, 800) < 0, "the last free slices are worth more than one large request"
    assert worth(1, 8, 8, 800) > 0.5
    assert worth(8, 8, 400, 800) == pytest.approx(0.8, abs=1e-3)


def test_the_price_falls_with_savings() -> None:
    budget = MoveBudget(0.02)
    for _ in range(49):
        budget.earn()
    assert budget.longest_plan(1) == 0
    budget.earn()
    assert budget.saved == pytest.approx(1)
    assert budget.longest_plan(1) == 1
    assert budget.longest_plan(0.4) == 0, "not worth its price"
    assert budget.longest_plan(-1) == 0
    assert CHEAPEST < budget.price < DEAREST
    for _ in range(950):
        budget.earn()
    assert budget.longest_plan(1) == 4
    assert budget.longest_plan(0.4) == 1
    budget.spend(19)
    assert budget.longest_plan(1) == 1
    for _ in range(100_000):
        budget.earn()
    assert budget.price == CHEAPEST
    assert budget.longest_plan(1) == LONGEST_PLAN
    assert budget.longest_plan(3 * CHEAPEST) == 3


def test_a_confined_budget_ignores_earlier_savings() -> None:
    budget = MoveBudget(0.5)
    for _ in range(100):
        budget.earn()
    assert budget.saved == pytest.approx(50)
    budget.confine(10)
    assert budget.saved == pytest.approx(5), "ten arrivals earn five"
    budget.spend(5)
    for _ in range(10):
        budget.earn()
    assert budget.longest_plan(1) == 0


def test_the_price_falls_towards_the_end() -> None:
    prices = []
    for left in (100_000, 5_000, 1_000, 100, 0):
        budget = MoveBudget(0.02)
        for _ in range(1_000):
            budget.earn()
        budget.confine(1_000 + left)
        for _ in range(1_000):
            budget.earn()
        assert budget.saved == pytest.approx(40 if left >= 1_000 else 20 + 0.02 * left)
        budget.spend(int(budget.saved) - 10)
        prices.append(budget.price)
    assert prices == sorted(prices, reverse=True)
    assert prices[-1] < 0.25 * prices[0]


def test_a_budget_without_income_allows_no_moves() -> None:
    budget = MoveBudget(0)
    budget.confine(100)
    budget.earn()
    assert budget.price == DEAREST
    assert budget.longest_plan(1) == 0
