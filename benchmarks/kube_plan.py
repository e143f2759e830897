"""The arrivals of pods: their order, profiles and lifetimes.

The plan depends only on the distribution, the seed and the size of the cluster. It is the same for
every allocator and for the forecast, and independent of what happens to the pods.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from slicewise.lab.mix import Mix

NODE_CPUS, GIB_PER_CPU = 256, 8
"""CPUs of a node, and memory per CPU in the proportion that pods request."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A pod to create: the gap after the previous one, its profile, and its lifetime.

    Both times are relative to their means.
    """

    gap: float
    profile: str
    size: int
    lifetime: float


@dataclass(frozen=True)
class Plan:
    """Parameters of a stream."""

    load: float
    """Demand of all pods together, as a share of all memory slices."""
    rate: float
    """Pods per second in the open stream, which also determines their mean lifetime."""
    seconds: float
    """Duration of the open stream; the second half is measured."""
    burst: int
    """Pods created at once in the empty cluster."""
    wave: int
    """Nodes that are schedulable at a time while the cluster ages; 0 for all."""
    turnovers: float
    """Mean lifetimes for which a wave ages; the last of them is measured."""
    together: float
    """Mean lifetimes for which all nodes then run together; the second half is measured."""
    step: float
    """Mean lifetimes per step in both."""
    patience: float
    """Seconds after which a waiting pod is deleted by its user."""
    cpus: int
    """CPUs requested per memory slice, with `GIB_PER_CPU`; 0 for almost none."""
    seed: int = 1

    @property
    def steps(self) -> int:
        """Number of steps while a wave ages."""
        return math.ceil(self.turnovers / self.step - 1e-9)

    @property
    def unmeasured(self) -> int:
        """Number of steps before the last mean lifetime."""
        return max(0, self.steps - math.ceil(1 / self.step - 1e-9))

    @property
    def steps_together(self) -> int:
        """Number of steps with all nodes schedulable."""
        return max(1, math.ceil(self.together / self.step - 1e-9))

    def waves(self, nodes: int) -> list[range]:
        """Return the node numbers of each wave."""
        size = self.wave or nodes
        return [range(first, min(first + size, nodes)) for first in range(0, nodes, size)]

    def mean_seconds(self, mix: Mix, slices: int) -> float:
        """Return the mean lifetime of a pod in a cluster of so many slices, in seconds."""
        return self.load * slices / self.rate / mix.mean_size


def arrivals(mix: Mix, seed: int) -> Iterator[Arrival]:
    """Yield the endless stream of arrivals of a seed."""
    rng = np.random.default_rng([seed, *mix.name.encode()])
    while True:
        kind = int(rng.choice(len(mix.profiles), p=mix.probabilities))
        profile = mix.profiles[kind]
        gap, lifetime = rng.exponential(1.0), rng.exponential(1.0)
        yield Arrival(float(gap), profile.name, profile.size, float(lifetime))


def at_once(stream: Iterator[Arrival], slices: float) -> list[Arrival]:
    """Return arrivals that request so many slices together.

    Lifetimes are exponential, so these have the same distribution as the remaining lifetimes in a
    cluster in steady state.
    """
    found: list[Arrival] = []
    while sum(arrival.size for arrival in found) < slices:
        found.append(next(stream))
    return found


def in_steps(
    stream: Iterator[Arrival], mix: Mix, plan: Plan, slices: float, steps: int
) -> Iterator[list[Arrival]]:
    """Return the arrivals of each step, for a steady state in which pods request so many slices."""
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
