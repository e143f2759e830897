"""Arrivals: which profile is asked for in each slot, and for how many slots it stays.

Every run has its own random stream, derived from the seed and the run's number alone. So all
policies see the same arrivals, and the result does not depend on who computes which run.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slicewise.core.errors import SlicewiseError
from slicewise.sim.mix import Mix

Ints = npt.NDArray[np.int64]
SmallInts = npt.NDArray[np.int32]

BINS = 20
"""Results of the published experiment are kept per 5 points of demand."""


class Lifetime(StrEnum):
    """The longest lifetime in the published experiment, in slots."""

    CAPACITY = "capacity"
    """The number of slices of the cluster: the reading that reproduces the published figures."""
    SATURATION = "saturation"
    """The number of slots until demand reaches capacity: the paper's own words."""


class Arrivals(NamedTuple):
    """One request a slot: which profile of the mix, and its lifetime in slots."""

    kinds: Ints
    lifetimes: Ints


def run_generator(seed: int, run: int) -> np.random.Generator:
    """The random stream of one run."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(run,))))


def draw_kinds(rng: np.random.Generator, mix: Mix, count: int) -> Ints:
    """Which profile each of the next requests asks for."""
    edges = np.cumsum(mix.probabilities)[:-1]
    return np.searchsorted(edges, rng.random(count), side="right").astype(np.int64)


def fill_up(
    rng: np.random.Generator, mix: Mix, gpus: int, lifetime: Lifetime
) -> tuple[Arrivals, Ints]:
    """Requests until demand reaches the cluster's capacity, and the demand bin of each.

    Demand is the sum of the window sizes asked for so far over all slices of the cluster. The
    request that reaches capacity is the last one and counts in the last bin.
    """
    capacity = gpus * mix.geometry.slices
    sizes = np.array([profile.size for profile in mix.profiles], np.int64)
    kinds = np.empty(0, np.int64)
    demand = np.empty(0, np.int64)
    while not len(demand) or demand[-1] < capacity:
        kinds = np.concatenate([kinds, draw_kinds(rng, mix, capacity)])
        demand = np.cumsum(sizes[kinds])
    slots = int(np.searchsorted(demand, capacity)) + 1
    longest = capacity if lifetime is Lifetime.CAPACITY else slots
    lifetimes = rng.integers(1, longest, size=slots, endpoint=True)
    bins = np.minimum(demand[:slots] * BINS // capacity, BINS - 1)
    return Arrivals(kinds[:slots], lifetimes), bins


def longest_lifetime(mix: Mix, gpus: int, load: float) -> int:
    """The longest lifetime at which sustained demand is ``load`` of the cluster's capacity.

    One request arrives a slot, so concurrent demand is mean lifetime times mean size; lifetimes
    are uniform from 1 to twice their mean. A load so low that they would be shorter is refused.
    """
    mean = load * gpus * mix.geometry.slices / mix.mean_size
    longest = round(2 * mean)
    if longest < 1:
        raise SlicewiseError(
            f"load {load:g} is too low for {gpus} {mix.geometry.model}: one comes a slot "
            f"({mix.name}) and would stay for less; the least is about {load / (2 * mean):.2g}"
        )
    return longest
