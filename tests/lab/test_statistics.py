"""Ratios, intervals and paired differences, against independently computed figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slicewise.lab.statistics import Ratio, student_t


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (29, 2.04523),
     (499, 1.96473)],
)  # fmt: skip
def test_students_t(degrees: int, quantile: float) -> None:
    assert student_t(degrees) == pytest.approx(quantile, rel=2e-3)


def test_a_mean_is_a_ratio_with_equal_denominators() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0])
    estimate = Ratio(values, np.ones(4)).estimate()
    assert estimate.value == 2.5
    margin = student_t(3) * math.sqrt(5 / 3) / 2
    assert (estimate.low, estimate.high) == pytest.approx((2.5 - margin, 2.5 + margin))


def test_a_ratio_is_of_sums_not_of_means() -> None:
    assert Ratio(np.array([1.0, 0.0]), np.array([1.0, 9.0])).value == 0.1


def test_one_run_has_no_interval_and_no_data_has_no_value() -> None:
    one = Ratio(np.array([1.0]), np.array([2.0])).estimate()
    assert one.value == 0.5
    assert math.isnan(one.low)
    none = Ratio(np.zeros(3), np.zeros(3)).estimate()
    assert math.isnan(none.value)


def test_pairing_removes_what_runs_share() -> None:
    rng = np.random.default_rng(5)
    shared = rng.normal(size=200)
    a = Ratio(10 + shared, np.ones(200))
    b = Ratio(9 + shared + rng.normal(scale=0.01, size=200), np.ones(200))
    difference = a.minus(b)
    assert difference.value == pytest.approx(1, abs=0.01)
    assert difference.high - difference.low < 0.01
    assert a.estimate().high - a.estimate().low > 0.2


def test_intervals_contain_the_true_value_in_95_percent() -> None:
    rng = np.random.default_rng(11)
    hits = 0
    for _ in range(1000):
        sizes = rng.integers(5, 30, 40).astype(float)
        accepted = rng.binomial(sizes.astype(int), 0.7).astype(float)
        estimate = Ratio(accepted, sizes).estimate()
        hits += estimate.low <= 0.7 <= estimate.high
    assert 925 <= hits <= 975
