"""The arrivals of the steady experiment: laws of lifetimes, and mixes that change within a run.

The load stays the same through a change: requests of a smaller mean size stay longer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.lab.mix import Mix
from slicewise.lab.statistics import Floats
from slicewise.lab.workload import Arrivals, Ints, draw_kinds, longest_lifetime


class LifetimeLaw(StrEnum):
    """How lifetimes of the same mean are distributed."""

    UNIFORM = "uniform"
    """From one slot to twice the mean."""
    EXPONENTIAL = "exponential"
    """Without memory: how long an instance is there says nothing about how long it will stay."""
    HEAVY = "heavy"
    """Log-normal: most are far shorter than the mean, and a few very long."""


_LONGEST = {LifetimeLaw.UNIFORM: 2, LifetimeLaw.EXPONENTIAL: 20, LifetimeLaw.HEAVY: 50}
"""The longest lifetime, in means; what is longer ends then."""

_SIGMA = 1.5
"""The standard deviation of the logarithm of heavy-tailed lifetimes."""


class Knowledge(StrEnum):
    """What requests say about how long they will stay."""

    EXACT = "exact"
    EARLY = "early"
    """They leave earlier than they said, by up to half."""
    CLASSES = "classes"
    """Whether their stay is short, medium or long: a third, all or five thirds of the mean."""
    WRONG = "wrong"
    """Half of them say how long another one stays."""
    HALF = "half"
    """Half of them say nothing."""
    NONE = "none"

    def stated(self, rng: np.random.Generator, lifetimes: Ints, mean: float) -> Ints:
        """Return what is said with requests of these lifetimes, or 0."""
        some = rng.random(len(lifetimes)) < 0.5
        match self:
            case Knowledge.EXACT:
                return lifetimes
            case Knowledge.EARLY:
                said = np.ceil(lifetimes / rng.uniform(0.5, 1, len(lifetimes)))
                return said.astype(np.int64)
            case Knowledge.CLASSES:
                which = np.searchsorted([2 / 3 * mean, 4 / 3 * mean], lifetimes)
                said = np.maximum(1, np.rint(mean * np.array([1, 3, 5]) / 3))
                return said.astype(np.int64)[which]
            case Knowledge.WRONG:
                return np.where(some, rng.permutation(lifetimes), lifetimes)
            case Knowledge.HALF:
                return np.where(some, lifetimes, 0)
            case Knowledge.NONE:
                return np.zeros_like(lifetimes)


class DriftKind(StrEnum):
    """How the mix changes within a run."""

    SUDDEN = "sudden"
    """To another mix in the middle of the run."""
    GRADUAL = "gradual"
    """To another mix from a quarter to three quarters of the run."""
    APPEARS = "appears"
    """The largest profile is not asked for before the middle of the run."""
    RETURNS = "returns"
    """The largest profile is not asked for in the second third of the run."""


@dataclass(frozen=True)
class Drift:
    """Two mixes of the same profiles, and when which of them is asked for."""

    kind: DriftKind
    first: Mix
    second: Mix

    def share(self, at: Floats) -> Floats:
        """Return the share of the second mix at these points of a run, from 0 to 1."""
        match self.kind:
            case DriftKind.GRADUAL:
                return np.clip(2 * at - 0.5, 0, 1)
            case DriftKind.RETURNS:
                return ((at >= 1 / 3) & (at < 2 / 3)).astype(np.float64)
            case _:
                return (at >= 0.5).astype(np.float64)


def drift(kind: DriftKind, mix: Mix, to: Mix | None = None) -> Drift:
    """Return a drift of a mix: to another one, or with and without its largest profile.

    Without another mix, a sudden or gradual drift swaps the probabilities of large and small ones.
    """
    if kind in (DriftKind.APPEARS, DriftKind.RETURNS):
        if to is not None:
            raise SlicewiseError(f"a drift that {kind} is of one profile, not to another mix")
        if len(mix.profiles) < 2:
            raise SlicewiseError(f"distribution {mix.name!r} has one profile, which cannot vanish")
        largest = max(mix.profiles, key=lambda profile: (profile.size, profile.compute))
        rest = 1 - mix.probabilities[mix.profiles.index(largest)]
        without = replace(
            mix,
            probabilities=tuple(
                0.0 if profile is largest else share / rest
                for profile, share in zip(mix.profiles, mix.probabilities, strict=True)
            ),
        )
        return Drift(kind, *((without, mix) if kind is DriftKind.APPEARS else (mix, without)))
    if to is None:
        order = sorted(range(len(mix.profiles)), key=lambda i: mix.profiles[i].size)
        swapped = dict(zip(order, reversed(order), strict=True))
        reverse = tuple(mix.probabilities[swapped[i]] for i in range(len(order)))
        to = replace(mix, name=f"{mix.name} reversed", probabilities=reverse)
        if reverse == mix.probabilities:
            raise SlicewiseError(
                f"distribution {mix.name!r} is the same with large and small swapped: name another "
                "one to drift to"
            )
    profiles = (*mix.profiles, *(p for p in to.profiles if p not in mix.profiles))
    first, second = (
        replace(
            each,
            profiles=profiles,
            probabilities=tuple(
                dict(zip(each.profiles, each.probabilities, strict=True)).get(profile, 0.0)
                for profile in profiles
            ),
        )
        for each in (mix, to)
    )
    return Drift(kind, first, second)


@dataclass(frozen=True)
class Sustained:
    """The arrivals of runs at a constant load."""

    mix: Mix
    gpus: int
    load: float
    slots: int
    law: LifetimeLaw = LifetimeLaw.UNIFORM
    drift: Drift | None = None

    @property
    def longest(self) -> int:
        """The longest lifetime in slots."""
        mixes = (self.mix,) if self.drift is None else (self.drift.first, self.drift.second)
        uniform = max(longest_lifetime(mix, self.gpus, self.load) for mix in mixes)
        return uniform * _LONGEST[self.law] // _LONGEST[LifetimeLaw.UNIFORM]

    @property
    def mean_lifetime(self) -> float:
        """The mean lifetime at the beginning, in slots."""
        first = self.mix if self.drift is None else self.drift.first
        return (1 + longest_lifetime(first, self.gpus, self.load)) / 2

    def draw(self, rng: np.random.Generator, begin: int, count: int) -> Arrivals:
        """Return the next arrivals of a run; ``begin`` is the slot of the first."""
        if self.drift is None:
            kinds = draw_kinds(rng, self.mix, count)
            longest: int | Ints = longest_lifetime(self.mix, self.gpus, self.load)
        else:
            first, second = self.drift.first, self.drift.second
            share = self.drift.share((begin + np.arange(count)) / self.slots)
            mixes = np.outer(1 - share, first.probabilities) + np.outer(share, second.probabilities)
            edges = np.cumsum(mixes, axis=1)[:, :-1]
            kinds = (rng.random(count)[:, None] >= edges).sum(axis=1)
            mean_size = (1 - share) * first.mean_size + share * second.mean_size
            offered = self.load * self.gpus * self.mix.geometry.slices
            longest = np.maximum(1, np.rint(2 * offered / mean_size)).astype(np.int64)
        return Arrivals(kinds, self._lifetimes(rng, longest, begin, count))

    def _lifetimes(
        self, rng: np.random.Generator, longest: int | Ints, begin: int, count: int
    ) -> Ints:
        if self.law is LifetimeLaw.UNIFORM:
            return rng.integers(1, longest, size=count, endpoint=True)
        mean = (np.broadcast_to(longest, count) + 1) / 2
        # A run begins with what would run already, because the longest lifetimes take too long to
        # wait for: instances of which a part is over, which are there once the last one is.
        there = slice(0, max(0, min(count, round(float(mean[0])) - begin)))
        waiting = np.arange(there.stop, 0, -1)
        if self.law is LifetimeLaw.EXPONENTIAL:
            drawn = rng.exponential(mean)
            drawn[there] += waiting
        else:
            logarithm = np.log(mean) - _SIGMA**2 / 2
            logarithm[there] += _SIGMA**2  # a long one is met more often
            drawn = rng.lognormal(logarithm, _SIGMA)
            drawn[there] = drawn[there] * rng.random(there.stop) + waiting
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)
