"""The pods that come to a cluster: in which order, what they want, and how long they run.

The same for whoever allocates, and for the model that foretells it: everything follows from the
distribution, the seed and the size of the cluster, and nothing from what becomes of the pods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from slicewise.sim.mix import Mix

NODE_CPUS, GIB_PER_CPU = 256, 8
"""What a node has beside its GPUs: as much memory a CPU as pods ask for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A pod to come: how long after the one before, what, and how long it runs.

    Both times are shares of their means.
    """

    gap: float
    profile: str
    size: int
    lifetime: float


@dataclass(frozen=True)
class Plan:
    """How long, how fast, how much."""

    load: float
    """What all pods together ask for, as a share of all memory slices."""
    rate: float
    """Pods a second in the open stream, which also says how long they live in the mean."""
    seconds: float
    """Of the open stream; the second half is measured."""
    burst: int
    """Pods that come at once into the empty cluster."""
    wave: int
    """Nodes that are open at a time while the cluster ages; 0 for all."""
    turnovers: float
    """Mean lifetimes for which it ages so; the last of them is measured."""
    together: float
    """Mean lifetimes for which it then goes on with all nodes open; the second half is measured."""
    step: float
    """Mean lifetimes that pass at once in both."""
    patience: float
    """Seconds after which a pod that waits is deleted by its user."""
    cpus: int
    """What a pod asks for beside each memory slice, with `GIB_PER_CPU`; 0 for hardly anything."""
    seed: int = 1

    @property
    def steps(self) -> int:
        """How often the clock moves while a wave ages."""
        return math.ceil(self.turnovers / self.step - 1e-9)

    @property
    def unmeasured(self) -> int:
        """The steps of them that come before the last lifetime."""
        return max(0, self.steps - math.ceil(1 / self.step - 1e-9))

    @property
    def steps_together(self) -> int:
        """How often it moves while all nodes are open."""
        return max(1, math.ceil(self.together / self.step - 1e-9))

    def waves(self, nodes: int) -> list[range]:
        """The nodes by the wave in which they are open, by number."""
        size = self.wave or nodes
        return [range(first, min(first + size, nodes)) for first in range(0, nodes, size)]

    def mean_seconds(self, mix: Mix, slices: int) -> float:
        """How long a pod runs in the mean, in a cluster of so many slices."""
        return self.load * slices / self.rate / mix.mean_size


def arrivals(mix: Mix, seed: int) -> Iterator[Arrival]:
    """The stream, without end; the same for the same seed."""
    rng = np.random.default_rng([seed, *mix.name.encode()])
    while True:
        kind = int(rng.choice(len(mix.profiles), p=mix.probabilities))
        profile = mix.profiles[kind]
        gap, lifetime = rng.exponential(1.0), rng.exponential(1.0)
        yield Arrival(float(gap), profile.name, profile.size, float(lifetime))


def at_once(stream: Iterator[Arrival], slices: float) -> list[Arrival]:
    """So many slices' worth of pods.

    Lifetimes are exponential, so these are as long as what is left of the lifetimes in a cluster
    that has been in use for ever.
    """
    found: list[Arrival] = []
    while sum(arrival.size for arrival in found) < slices:
        found.append(next(stream))
    return found


def in_steps(
    stream: Iterator[Arrival], mix: Mix, plan: Plan, slices: float, steps: int
) -> Iterator[list[Arrival]]:
    """What comes in each step, where pods that ask for so many slices are to live at a time."""
    each = mix.mean_size / slices
    """The mean time between two pods, in mean lifetimes."""
    arrival = next(stream)
    when = arrival.gap * each
    for number in range(1, steps + 1):
        batch: list[Arrival] = []
        while when <= number * plan.step:
            batch.append(arrival)
            arrival = next(stream)
            when += arrival.gap * each
        yield batch
