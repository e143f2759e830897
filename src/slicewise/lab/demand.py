"""A fixed demand on clusters of several sizes: all of them get the same requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.lab.experiment import Experiment, Steady, Tick
from slicewise.lab.mix import Mix
from slicewise.lab.workload import Ints, longest_lifetime

MOST_DEMAND = 1_000_000
"""The maximum demand in GPUs."""


@dataclass(frozen=True)
class Demand:
    """Requests of a mix, one per slot, with a longest lifetime in slots."""

    mix: Mix
    longest: int

    @classmethod
    def of_gpus(cls, mix: Mix, gpus: float) -> Demand:
        """Return the demand that occupies the slices of this many GPUs if nothing is rejected.

        Lifetimes are uniform from 1 to the longest, so their mean is (longest + 1) / 2. They are
        whole slots: `offered_gpus` is the demand after rounding.
        """
        if not 1 <= gpus <= MOST_DEMAND:
            raise SlicewiseError(
                f"load must be 1 to {MOST_DEMAND} GPUs, not {gpus:g}: it is the demand itself, "
                "not its share of a cluster"
            )
        return cls(mix, max(1, round(2 * gpus * mix.geometry.slices / mix.mean_size) - 1))

    @property
    def offered_gpus(self) -> float:
        """The slices that all requests together occupy on average, in whole GPUs."""
        return (self.longest + 1) / 2 * self.mix.mean_size / self.mix.geometry.slices

    @property
    def spread_gpus(self) -> float:
        """The standard deviation of the occupied slices, in whole GPUs.

        A request that arrived k slots ago still runs with probability p = 1 - k / longest, and
        requests are independent: the variances of (size if running) add up.
        """
        pairs = list(zip(self.mix.profiles, self.mix.probabilities, strict=True))
        squares = sum(profile.size**2 * probability for profile, probability in pairs)
        there = 1 - np.arange(self.longest) / self.longest
        variance = float((squares * there - (self.mix.mean_size * there) ** 2).sum())
        return math.sqrt(max(0.0, variance)) / self.mix.geometry.slices

    def load_on(self, gpus: int) -> float:
        """Return the load with which `Steady` draws these requests for a cluster.

        It is computed from the longest lifetime, not from the demand, so that rounding gives the
        same lifetimes for every size.
        """
        load = self.longest * self.mix.mean_size / (2 * gpus * self.mix.geometry.slices)
        assert longest_lifetime(self.mix, gpus, load) == self.longest
        return load


@dataclass(frozen=True)
class SameDemand(Experiment):
    """Clusters of several sizes, each under some policies, all with the same requests.

    Its entrants are pairs of an entrant of `Steady` and a size; the field ``gpus`` is not used.
    """

    demands: tuple[Demand, ...] = ()
    trials: tuple[tuple[tuple[int, int], ...], ...] = ()
    """By mix: pairs of an entrant of `Steady` and a number of GPUs."""
    lifetimes: int = 40
    warmup: int = 3
    oracle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for mix, demand in enumerate(self.demands):
            self.on_cluster(mix, math.ceil(demand.offered_gpus))  # raises if it cannot be run

    def units(self, mix: int) -> int:
        """Return the number of slots."""
        return self.lifetimes * self.demands[mix].longest

    def entrants(self, mix: int) -> range:
        """Return the indexes of the trials."""
        return range(len(self.trials[mix]))

    def simulate(self, mix: int, policy: int, run: int, tick: Tick) -> Ints:
        """Return sums over the measured slots by `STEADY_COLUMNS`."""
        entrant, gpus = self.trials[mix][policy]
        return self.on_cluster(mix, gpus).simulate(mix, entrant, run, tick)

    def on_cluster(self, mix: int, gpus: int) -> Steady:
        """Return the steady experiment with this demand on a cluster."""
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
