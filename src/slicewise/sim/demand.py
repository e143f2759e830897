"""A demand held fixed while the cluster is not: the same requests for clusters of every size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.sim.experiment import Experiment, Steady, Tick
from slicewise.sim.mix import Mix
from slicewise.sim.workload import Ints, longest_lifetime

MOST_DEMAND = 1_000_000
"""In GPUs."""


@dataclass(frozen=True)
class Demand:
    """What has to be carried: requests of a mix, one a slot, that stay so long at most."""

    mix: Mix
    longest: int

    @classmethod
    def of_gpus(cls, mix: Mix, gpus: float) -> Demand:
        """The demand that would keep so many GPUs' worth of slices occupied, nothing rejected.

        Lifetimes are uniform from 1 to the longest, so on average they are half of one more than
        that. They are whole slots: see `offered_gpus` for what it comes to.
        """
        if not 1 <= gpus <= MOST_DEMAND:
            raise SlicewiseError(
                f"load must be 1 to {MOST_DEMAND} GPUs, not {gpus:g}: it is the demand itself, "
                "not its share of a cluster"
            )
        return cls(mix, max(1, round(2 * gpus * mix.geometry.slices / mix.mean_size) - 1))

    @property
    def offered_gpus(self) -> float:
        """Slices that all requests together hold on average, in whole GPUs."""
        return (self.longest + 1) / 2 * self.mix.mean_size / self.mix.geometry.slices

    @property
    def spread_gpus(self) -> float:
        """The standard deviation of the slices they would hold, in whole GPUs.

        A request that came k slots ago is still there with probability p = 1 - k / longest, and
        requests are independent: the variances of (size if still there) add up.
        """
        pairs = list(zip(self.mix.profiles, self.mix.probabilities, strict=True))
        squares = sum(profile.size**2 * probability for profile, probability in pairs)
        there = 1 - np.arange(self.longest) / self.longest
        variance = float((squares * there - (self.mix.mean_size * there) ** 2).sum())
        return math.sqrt(max(0.0, variance)) / self.mix.geometry.slices

    def load_on(self, gpus: int) -> float:
        """What `Steady` must be told as the load to draw these very requests for a cluster.

        Found from the longest lifetime and not from the demand: whatever the size, rounding
        then leads back to the same lifetimes.
        """
        load = self.longest * self.mix.mean_size / (2 * gpus * self.mix.geometry.slices)
        assert longest_lifetime(self.mix, gpus, load) == self.longest
        return load


@dataclass(frozen=True)
class SameDemand(Experiment):
    """Clusters of several sizes, each under some policies, all with the same requests.

    Its entrants are pairs of one of `Steady`'s entrants and a size; the field ``gpus`` means
    nothing here.
    """

    demands: tuple[Demand, ...] = ()
    trials: tuple[tuple[tuple[int, int], ...], ...] = ()
    """By mix: the entrants, policies by their place and then the oracle, each with its GPUs."""
    lifetimes: int = 40
    warmup: int = 3
    oracle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for mix, demand in enumerate(self.demands):
            self.on_cluster(mix, math.ceil(demand.offered_gpus))  # refuses what cannot be

    def units(self, mix: int) -> int:
        """The slots."""
        return self.lifetimes * self.demands[mix].longest

    def entrants(self, mix: int) -> range:
        """The trials, by their place."""
        return range(len(self.trials[mix]))

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Sums over the measured slots by `STEADY_COLUMNS`."""
        entrant, gpus = self.trials[mix][policy]
        return self.on_cluster(mix, gpus).simulate(mix, entrant, run, tick)

    def on_cluster(self, mix: int, gpus: int) -> Steady:
        """The steady experiment that offers this demand to a cluster."""
        return Steady(
            self.mixes,
            self.policies,
            gpus,
            self.runs,
            self.seed,
            self.on_engine,
            self.gpus_per_node,
            self._compiled,  # tables do not depend on the size
            load=self.demands[mix].load_on(gpus),
            lifetimes=self.lifetimes,
            warmup=self.warmup,
            oracle=self.oracle,
        )
