"""The search ends at the smallest size, and its interval has the stated coverage."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.lab.sizing import DRAWS, Counted, Search, exactly, fewer, share_estimate
from slicewise.lab.statistics import Estimate, Floats, Ratio, student_t


def search(
    target: float,
    start: int = 10,
    spacing: int = 3,
    most: int = 400,
    step: int = 1,
    window: int = 0,
) -> Search:
    return Search(target, start, spacing, 1, most, step, window)


def run(searching: Search, share: Callable[[int], Estimate]) -> int:
    """Try the requested sizes until there are no more; return how many were tried."""
    while sizes := searching.next_sizes():
        assert len(set(sizes)) == len(sizes)
        assert not searching.tried.keys() & set(sizes)
        for gpus in sizes:
            searching.record(gpus, share(gpus))
    return len(searching.tried)


SHARES = st.integers(0, 1 << 32).map(lambda seed: np.random.default_rng(seed).random(120) ** 2)
FALLING = SHARES.map(lambda shares: dict(enumerate(sorted(shares.tolist(), reverse=True), 1)))
ANY = SHARES.map(lambda shares: dict(enumerate(shares.tolist(), 1)))


@given(FALLING, st.floats(0.001, 0.9), st.integers(1, 120), st.integers(1, 40), st.integers(1, 7))
def test_the_search_finds_the_same_size_as_trying_all(
    shares: dict[int, float], target: float, start: int, spacing: int, step: int
) -> None:
    most = 120 // step * step
    searching = search(target, start=start, spacing=spacing, step=step, most=most)
    run(searching, lambda gpus: exactly(shares[gpus]))
    meeting = [gpus for gpus in range(step, most + 1, step) if shares[gpus] <= target]
    assert searching.needed == (meeting[0] if meeting else None)
    assert searching.interval == (searching.needed, searching.needed)


@given(ANY, st.floats(0.001, 0.9), st.integers(1, 120), st.integers(0, 9))
def test_what_is_found_holds_for_every_size_tried(
    shares: dict[int, float], target: float, start: int, window: int
) -> None:
    searching = search(target, start=start, window=window, most=120)
    run(searching, lambda gpus: exactly(shares[gpus]))
    needed, (first, _) = searching.needed, searching.interval
    tried = sorted(searching.tried)
    if needed is None:
        assert 120 in tried
        assert shares[120] > target
        return
    assert all(shares[gpus] <= target for gpus in tried if gpus >= needed)
    assert needed == 1 or (needed - 1 in tried and shares[needed - 1] > target)
    assert set(range(max(1, needed - window), min(120, needed + window) + 1)) <= set(tried)
    assert first is not None
    assert shares[first] <= target
    assert all(shares[gpus] > target for gpus in tried if gpus < first)
    assert first == 1 or first - 1 in tried


def about(value: float) -> Estimate:
    return Estimate(value, value / 1.3, value * 1.3)


def test_a_smooth_curve_takes_few_sizes_however_large_the_cluster() -> None:
    searching = search(0.001, start=10_000, spacing=58, most=40_000)
    assert run(searching, lambda gpus: about(math.exp(-(gpus - 9_000) / 180))) < 40
    assert searching.needed == 9_000 + math.ceil(180 * math.log(1000))
    low, high = searching.interval
    assert low == 9_000 + math.ceil(180 * math.log(1000 / 1.3))
    assert high == 9_000 + math.ceil(180 * math.log(1000 * 1.3))


def test_a_short_interval_is_tried_size_by_size() -> None:
    searching = search(0.01, start=40, spacing=10)
    run(searching, lambda gpus: about(math.exp(-gpus / 10)))
    low, high = searching.interval
    assert (low, searching.needed, high) == (44, 47, 49)
    assert set(range(43, 50)) <= set(searching.tried)


def test_shares_have_intervals_on_a_logarithmic_scale() -> None:
    rejected, arrivals = np.array([0.0, 9.0, 1.0, 2.0]), np.full(4, 1000.0)
    found = share_estimate(rejected, arrivals)
    assert found.value == pytest.approx(0.003)
    assert found.value / found.low == pytest.approx(found.high / found.value)
    plain = Ratio(rejected, arrivals).estimate()
    assert math.log(found.high / found.value) == pytest.approx((plain.high - plain.value) / 0.003)
    assert 0 < found.low < found.value
    # All rejections in one of n runs: the error is as large as the share itself.
    alone = share_estimate(np.array([0.0, 0.0, 12.0]), np.full(3, 1000.0))
    assert alone.high / alone.value == pytest.approx(math.exp(student_t(2)))


def test_no_rejections_still_have_an_upper_bound() -> None:
    none = share_estimate(np.zeros(5), np.full(5, 1000.0))
    assert (none.value, none.low) == (0, 0)
    assert (1 - none.high) ** 5000 == pytest.approx(0.025, rel=0.01)
    assert share_estimate(np.zeros(3), np.full(3, 1.0)).high == 1


def test_one_run_has_no_interval() -> None:
    found = share_estimate(np.array([3.0]), np.array([1000.0]))
    assert found.value == 0.003
    assert math.isnan(found.low)
    assert math.isnan(found.high)


class Model:
    """Runs of an invented policy with known shares, which fall by a tenth with every GPU.

    Each run has its own random factor, the same for every size and policy, as with shared requests.
    It varies as much as rejections of one in a thousand do. A request that is rejected on some
    cluster is rejected on every smaller one.
    """

    sizes = np.arange(20, 90)
    arrivals = 5000.0

    def __init__(self, worse_by: int = 0) -> None:
        self.share = np.minimum(1.0, 0.25 * np.exp(-0.1 * (self.sizes - worse_by)))

    def true_size(self, target: float) -> int:
        return int(self.sizes[np.argmax(self.share <= target)])

    def counted(self, luck: Floats, rng: np.random.Generator) -> Counted:
        most = float(self.share.max())
        rejected = [
            np.searchsorted(
                np.sort(rng.random(rng.poisson(self.arrivals * most * each))), self.share / most
            )
            for each in luck
        ]
        shape = (len(luck), len(self.sizes))
        return Counted(self.sizes, np.array(rejected, np.float64), np.full(shape, self.arrivals))


def answer(counted: Counted, target: float) -> Search:
    smallest, largest = int(counted.sizes[0]), int(counted.sizes[-1])
    searching = Search(target, 30, 5, smallest, largest)

    def share(gpus: int) -> Estimate:
        at = gpus - smallest
        return share_estimate(counted.rejected[:, at], counted.arrivals[:, at])

    run(searching, share)
    return searching


@pytest.mark.parametrize(("target", "runs"), [(0.01, 8), (0.001, 20)])
def test_intervals_contain_the_true_size_in_95_percent(target: float, runs: int) -> None:
    rng = np.random.default_rng(7)
    model, other = Model(), Model(worse_by=8)
    truth, worse = model.true_size(target), other.true_size(target)
    repeats = 200
    low_misses = high_misses = saved_misses = width = 0
    for _ in range(repeats):
        luck = rng.gamma(2, 1 / 2, runs)
        one, two = model.counted(luck, rng), other.counted(luck, rng)
        found = answer(one, target)
        low, high = found.interval
        assert low is not None
        assert high is not None
        assert found.needed is not None
        assert low <= found.needed <= high
        low_misses += truth < low
        high_misses += truth > high
        width += high - low
        least, most = fewer(one, two, target, rng)
        saved_misses += not least <= worse - truth <= most
    # Nominal: 2.5% on each side, 5% together; the limits are three standard errors away.
    assert low_misses <= 0.06 * repeats
    assert high_misses <= 0.06 * repeats
    assert saved_misses <= 0.1 * repeats
    # The width is needed: the random factor of the runs changes the size by several GPUs.
    assert 1 <= width / repeats < 30


def test_needed_sizes_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(3)
    counted = Counted(
        np.array([4, 5, 7, 9, 10]),
        rng.integers(0, 9, (6, 5)).astype(np.float64),
        np.full((6, 5), 100.0),
    )
    weights = rng.multinomial(6, np.full(6, 1 / 6), size=50).astype(np.float64)
    for target in (0.0, 0.03, 0.04, 0.05, 1.0):
        for row, needed in zip(weights, counted.needed(weights, target), strict=True):
            shares = row @ counted.rejected / (row @ counted.arrivals)
            slow = next(
                (
                    gpus
                    for at, gpus in enumerate(counted.sizes)
                    if all(share <= target for share in shares[at:])
                ),
                counted.sizes[-1],
            )
            assert needed == slow


def test_the_same_policy_saves_nothing() -> None:
    counted = Model().counted(np.ones(5), np.random.default_rng(1))
    assert fewer(counted, counted, 0.01, np.random.default_rng(1)) == (0, 0)
    assert DRAWS >= 1000
