"""The smallest cluster that meets a target: which sizes to try, and how sure the answer is.

Rejections become fewer as a cluster grows, but what is known of them is measured: a size may meet
the target by luck. So the size needed is the smallest *from which on* every size tried meets it.

Nothing here simulates. A `Search` says which sizes to try next and is told what was found there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from slicewise.sim.statistics import Estimate, Floats, Ratio
from slicewise.sim.workload import Ints

FIRST_SIZES = 6
"""How many sizes are tried to begin with, a spacing apart."""
FILL = 8
"""The interval of the answer is tried in at least so many steps, where it has so many sizes."""
DRAWS = 2000
"""How often the runs are drawn anew for the interval of a difference."""

_NONE_SEEN = -math.log(0.025)
"""What could be expected of something that was not seen once, at the end of a 95% interval."""


def share_estimate(rejected: Floats, arrivals: Floats) -> Estimate:
    """The share rejected over all runs, with a 95% interval on a logarithmic scale.

    Few runs hold most of the rejections when there are few, so the share is skewed: the interval
    reaches further up than down, and never below nothing.
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
    """A share that was counted and has no interval: one recording is one sample."""
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
    """The sizes of one policy: those tried, and those to try next."""

    target: float
    """The largest share that may be rejected."""
    start: int
    """The first size to try, in GPUs."""
    spacing: int
    """How far apart the first sizes are."""
    least: int
    most: int
    step: int = 1
    """Only multiples of so many GPUs are tried."""
    window: int = 0
    """So many sizes on either side of the answer are tried as well."""
    tried: dict[int, Estimate] = field(default_factory=dict)

    def record(self, gpus: int, share: Estimate) -> None:
        """What was found at a size."""
        self.tried[gpus] = share

    @property
    def needed(self) -> int | None:
        """The smallest size from which on all that were tried meet the target, if any does."""
        return self._settled(_value)[1]

    @property
    def interval(self) -> tuple[int | None, int | None]:
        """From the first size that may meet the target to the one from which on all surely do.

        The first is the smallest whose interval begins at the target or below, the other the
        smallest from which on all intervals end there. True shares fall as clusters grow, so the
        size truly needed is missed only if the interval of its own share, or that of the size
        just below, misses the truth on one given side: 2.5% each. Sizes without intervals are
        judged by their share alone.
        """
        return self._first(_low)[1], self._settled(_high)[1]

    def next_sizes(self) -> list[int]:
        """What to try next; nothing when the answer is final."""
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
        """Sizes as they can be tried: within the bounds, multiples of the step, not yet known."""
        lowest, highest = -(-self.least // self.step), -(-self.most // self.step)
        steps = {min(max(-(-gpus // self.step), lowest), highest) for gpus in wanted}
        return sorted({self.step * count for count in steps} - self.tried.keys())

    def _meets(self, gpus: int, reading: _Reading) -> bool:
        return reading(self.tried[gpus]) <= self.target

    def _first(self, reading: _Reading) -> tuple[int | None, int | None]:
        """The last size tried before the first that meets the target, and that first one."""
        below: int | None = None
        for gpus in sorted(self.tried):
            if self._meets(gpus, reading):
                return below, gpus
            below = gpus
        return below, None

    def _settled(self, reading: _Reading) -> tuple[int | None, int | None]:
        """The last size that does not meet the target, and the next larger one tried."""
        above: int | None = None
        for gpus in sorted(self.tried, reverse=True):
            if not self._meets(gpus, reading):
                return gpus, above
            above = gpus
        return None, above

    def _towards(self, below: int | None, at: int | None, reading: _Reading) -> list[int]:
        """Sizes that narrow a gap between one that does not meet the target and one that does."""
        smallest, largest = min(self.tried), max(self.tried)
        reach = max(largest - smallest, self.spacing, 2 * self.step)
        if at is None:
            return [largest + reach // 2, largest + reach]
        if below is None:
            return [smallest - reach // 2, smallest - reach]
        if at - below <= self.step:
            return []
        # Shares fall about exponentially, so a line through their logarithms hits close.
        floor = self.target / 1000
        upper, lower = (max(reading(self.tried[gpus]), floor) for gpus in (below, at))
        fall = math.log(upper / self.target) / math.log(upper / lower) if upper > lower else 0.5
        guess = below + int(fall * (at - below)) // self.step * self.step
        inner = (guess, guess + self.step, (below + at) // 2)
        return [min(max(gpus, below + self.step), at - self.step) for gpus in inner]

    def _inside(self) -> range:
        """The interval, in steps that are small beside it."""
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
    """What was counted for one policy: by run and by size, the sizes ascending."""

    sizes: Ints
    rejected: Floats
    arrivals: Floats

    def needed(self, weights: Floats, target: float) -> Ints:
        """The size needed when each run counts so many times, a row of weights an answer.

        Where even the largest size tried does not meet the target, it stands for the answer.
        """
        short = weights @ self.rejected > target * (weights @ self.arrivals)
        # The last size that falls short, counted from the end; the answer is the one after it.
        last = np.where(short.any(axis=1), short.shape[1] - np.argmax(short[:, ::-1], axis=1), 0)
        return self.sizes[np.minimum(last, len(self.sizes) - 1)]


def fewer(one: Counted, other: Counted, target: float, rng: np.random.Generator) -> tuple[int, int]:
    """A 95% interval over the runs for how many GPUs fewer ``one`` needs than ``other``.

    Both had the same requests in each run. The runs are drawn anew, with replacement, and both
    sizes are looked up for the same draw: what the requests do to both cancels out. The interval
    holds the middle 95% of the differences.
    """
    runs = len(one.rejected)
    draws = rng.multinomial(runs, np.full(runs, 1 / runs), size=DRAWS).astype(np.float64)
    low, high = np.percentile(
        other.needed(draws, target) - one.needed(draws, target),
        [2.5, 97.5],
        method="inverted_cdf",
    )
    return int(low), int(high)
