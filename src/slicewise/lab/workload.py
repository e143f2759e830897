"""Arrivals: the profile requested in each slot, and its lifetime in slots.

Every run has its own random stream, derived from the seed and the run's number only. So all
policies see the same arrivals, and results do not depend on the workers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slicewise.core.errors import SlicewiseError
from slicewise.lab.mix import Mix

Ints = npt.NDArray[np.int64]
SmallInts = npt.NDArray[np.int32]

BINS = 20
"""Demand bins of the published experiment, 5 points each."""


class Lifetime(StrEnum):
    """The longest lifetime in the published experiment, in slots."""

    CAPACITY = "capacity"
    """The number of slices of the cluster: the reading that reproduces the published figures."""
    SATURATION = "saturation"
    """The number of slots until demand reaches capacity: the paper's definition."""


class Arrivals(NamedTuple):
    """One request per slot: its profile in the mix, and its lifetime in slots."""

    kinds: Ints
    lifetimes: Ints
    stated: Ints | None = None
    """Its lifetime as it was said with the request, or 0; None if nothing is ever said."""


def run_generator(seed: int, run: int) -> np.random.Generator:
    """Return the random stream of one run."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(run,))))


def draw_kinds(rng: np.random.Generator, mix: Mix, count: int) -> Ints:
    """Draw the profiles of the next requests."""
    edges = np.cumsum(mix.probabilities)[:-1]
    return np.searchsorted(edges, rng.random(count), side="right").astype(np.int64)


def fill_up(
    rng: np.random.Generator, mix: Mix, gpus: int, lifetime: Lifetime
) -> tuple[Arrivals, Ints]:
    """Draw requests until demand reaches the cluster's capacity; also return their demand bins.

    Demand is the sum of all requested window sizes so far, divided by the slices of the cluster.
    The request that reaches capacity is the last one and belongs to the last bin.
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


def longest_lifetime(mix: Mix, gpus: int, load: float, per_slot: float = 1.0) -> int:
    """Return the longest lifetime at which sustained demand is ``load`` of the capacity.

    ``per_slot`` requests arrive per slot on average, so concurrent demand is that times the mean
    lifetime times the mean size; lifetimes are uniform from 1 to twice their mean. Raise if the
    load is too low for a lifetime of 1.
    """
    mean = load * gpus * mix.geometry.slices / mix.mean_size / per_slot
    longest = round(2 * mean)
    if longest < 1:
        raise SlicewiseError(
            f"load {load:g} is too low for {gpus} {mix.geometry.model}: lifetimes would be shorter "
            f"than a slot ({mix.name}); the minimum is about {load / (2 * mean):.2g}"
        )
    return longest
