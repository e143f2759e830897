"""The search for the smallest cluster that meets a target, with its uncertainty.

Rejections decrease with size, but they are measured: a size may meet the target by chance. So the
size needed is the smallest such that it and every larger size tried meet the target.

Nothing here simulates: a `Search` returns the sizes to try next, and the caller records results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from slicewise.lab.statistics import Estimate, Floats, Ratio
from slicewise.lab.workload import Ints

FIRST_SIZES = 6
"""The number of sizes in the first round."""
FILL = 8
"""The interval of the answer is searched in at least this many steps, if it has as many sizes."""
DRAWS = 2000
"""The number of bootstrap samples for the interval of a difference."""

_NONE_SEEN = -math.log(0.025)
"""The upper end of a 95% interval for the expected number of events if none was observed."""


def share_estimate(rejected: Floats, arrivals: Floats) -> Estimate:
    """Return the rejected share over all runs, with a 95% interval on a logarithmic scale.

    If rejections are rare, a few runs have most of them and the share is skewed: the interval is
    wider above than below, and never negative.
    """
    ratio = Ratio(rejected, arrivals)
    value, high = ratio.value, ratio.estimate().high
    if math.isnan(high):
        return Estimate(value, math.nan, math.nan)
    if value == 0:
        return Estimate(0.0, 0.0, min(1.0, _NONE_SEEN / float(arrivals.sum())))
    factor = math.exp((high - value) / value)
    return Estimate(value, value / factor, min(1.0, value * factor))


def exactly(value: float) -> Estimate:
    """Return a share without an interval: a recording is one sample."""
    return Estimate(value, math.nan, math.nan)


_Reading = Callable[[Estimate], float]


def _value(estimate: Estimate) -> float:
    return estimate.value


def _low(estimate: Estimate) -> float:
    return estimate.value if math.isnan(estimate.low) else estimate.low


def _high(estimate: Estimate) -> float:
    return estimate.value if math.isnan(estimate.high) else estimate.high


@dataclass
class Search:
    """The search for one policy: the sizes tried, and those to try next."""

    target: float
    """The maximum share that may be rejected."""
    start: int
    """The first size to try, in GPUs."""
    spacing: int
    """The distance between the first sizes."""
    least: int
    most: int
    step: int = 1
    """Sizes are multiples of this."""
    window: int = 0
    """The number of sizes on either side of the answer that are tried as well."""
    tried: dict[int, Estimate] = field(default_factory=dict)

    def record(self, gpus: int, share: Estimate) -> None:
        """Record the rejected share at a size."""
        self.tried[gpus] = share

    @property
    def needed(self) -> int | None:
        """The smallest size such that it and all larger ones tried meet the target, if any."""
        return self._settled(_value)[1]

    @property
    def interval(self) -> tuple[int | None, int | None]:
        """From the first size that may meet the target to the first that certainly does.

        The lower end is the smallest size with an interval that begins at or below the target.
        The upper end is the smallest such that its interval and those of all larger sizes end at
        or below the target. True shares decrease with size, so the interval misses the size truly
        needed only if the interval of that size's share, or of the next smaller one, misses the
        true value on one given side: 2.5% each. Without intervals the shares decide.
        """
        return self._first(_low)[1], self._settled(_high)[1]

    def next_sizes(self) -> list[int]:
        """Return the sizes to try next; none if the answer is final."""
        if not self.tried:
            return self._new(self.start + k * self.spacing for k in range(FIRST_SIZES))
        narrower = self._new(
            (
                *self._towards(*self._first(_low), _low),
                *self._towards(*self._settled(_value), _value),
                *self._towards(*self._settled(_high), _high),
            )
        )
        return narrower or self._new((*self._inside(), *self._around()))

    def _new(self, wanted: Iterable[int]) -> list[int]:
        """Round sizes to multiples of the step within the bounds; drop those already tried."""
        lowest, highest = -(-self.least // self.step), -(-self.most // self.step)
        steps = {min(max(-(-gpus // self.step), lowest), highest) for gpus in wanted}
        return sorted({self.step * count for count in steps} - self.tried.keys())

    def _meets(self, gpus: int, reading: _Reading) -> bool:
        return reading(self.tried[gpus]) <= self.target

    def _first(self, reading: _Reading) -> tuple[int | None, int | None]:
        """Return the first size that meets the target, preceded by the next smaller one tried."""
        below: int | None = None
        for gpus in sorted(self.tried):
            if self._meets(gpus, reading):
                return below, gpus
            below = gpus
        return below, None

    def _settled(self, reading: _Reading) -> tuple[int | None, int | None]:
        """Return the largest size that does not meet the target, and the next larger one tried."""
        above: int | None = None
        for gpus in sorted(self.tried, reverse=True):
            if not self._meets(gpus, reading):
                return gpus, above
            above = gpus
        return None, above

    def _towards(self, below: int | None, at: int | None, reading: _Reading) -> list[int]:
        """Return sizes that narrow the gap between a size that fails and one that meets."""
        smallest, largest = min(self.tried), max(self.tried)
        reach = max(largest - smallest, self.spacing, 2 * self.step)
        if at is None:
            return [largest + reach // 2, largest + reach]
        if below is None:
            return [smallest - reach // 2, smallest - reach]
        if at - below <= self.step:
            return []
        # Shares decrease about exponentially: interpolate their logarithms.
        floor = self.target / 1000
        upper, lower = (max(reading(self.tried[gpus]), floor) for gpus in (below, at))
        fall = math.log(upper / self.target) / math.log(upper / lower) if upper > lower else 0.5
        guess = below + int(fall * (at - below)) // self.step * self.step
        inner = (guess, guess + self.step, (below + at) // 2)
        return [min(max(gpus, below + self.step), at - self.step) for gpus in inner]

    def _inside(self) -> range:
        """Return sizes inside the interval, in at least `FILL` steps."""
        first, last = self.interval
        if first is None or last is None:
            return range(0)
        gap = max(self.step, (last - first) // FILL)
        return range(first, last, gap)

    def _around(self) -> range:
        if self.needed is None:
            return range(0)
        reach = self.window * self.step
        return range(max(self.least, self.needed - reach), self.needed + reach + 1, self.step)


@dataclass(frozen=True)
class Counted:
    """Rejections and arrivals of one policy, by run and by ascending size."""

    sizes: Ints
    rejected: Floats
    arrivals: Floats

    def needed(self, weights: Floats, target: float) -> Ints:
        """Return the size needed for each row of weights, which are multiplicities of the runs.

        If even the largest size tried does not meet the target, it is the answer.
        """
        short = weights @ self.rejected > target * (weights @ self.arrivals)
        # The answer is the size after the largest one that falls short.
        last = np.where(short.any(axis=1), short.shape[1] - np.argmax(short[:, ::-1], axis=1), 0)
        return self.sizes[np.minimum(last, len(self.sizes) - 1)]


def fewer(one: Counted, other: Counted, target: float, rng: np.random.Generator) -> tuple[int, int]:
    """Return a 95% interval for how many GPUs fewer ``one`` needs than ``other``.

    This is a paired bootstrap over the runs: both had the same requests in each run, and both
    sizes are computed for the same resampled runs. The interval is the middle 95% of the
    differences.
    """
    runs = len(one.rejected)
    draws = rng.multinomial(runs, np.full(runs, 1 / runs), size=DRAWS).astype(np.float64)
    low, high = np.percentile(
        other.needed(draws, target) - one.needed(draws, target),
        [2.5, 97.5],
        method="inverted_cdf",
    )
    return int(low), int(high)
