"""Least lost time: keep shut, for the shortest time, the places that are asked for.

`least-lost` counts the places that a placement shuts. This policy asks for how long each stays
shut because of it. A window that is open now is shut for the whole stay of the new instance. One
with k instances in it is shut anyway until the last of them leaves, and the new one makes a
difference only if it leaves later still. If instances stay for times without memory, each of the
k+1 is the last to leave with the same chance, and the expected extra time is 1/(1+k) of a mean
lifetime. No number is fitted there.

The cost of a placement is the sum, over the windows of the profiles asked for that it touches, of
the window's size times this time. Each slice that it leaves free where no such window is open any
more adds `stranding`. An empty GPU is opened last where a whole-GPU profile is asked for.

It is no policy for every mix: where large profiles dominate it may reject more than `least-lost`
does. docs/policies.md has the example.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from slicewise.core.geometry import Geometry, Profile
from slicewise.core.states import GpuState
from slicewise.core.tables import cached
from slicewise.policies.asked_for import (
    AskedFor,
    asked_profiles,
    stranded_slices,
    whole_is_asked,
)
from slicewise.policies.base import Key, ScorePolicy


class LostTime(ScorePolicy):
    """A policy of this kind, with parameters by GPU model."""

    @abstractmethod
    def on(self, geometry: Geometry) -> LeastLostTime:
        """The policy with the parameters for a model."""


@dataclass(frozen=True)
class LeastLostTime(LostTime):
    """Goes where the places asked for stay shut for the shortest time."""

    asked_for: AskedFor = None
    stranding: float = 4
    """What a slice costs that no place asked for can use any more."""
    weights: tuple[tuple[str, float], ...] = ()
    """By profile: what its windows count, beyond their size; 1 for those not named."""
    spares: bool = False
    """Whether empty GPUs are opened last although no whole-GPU profile is asked for."""

    name = "least-lost-time"
    summary = "Places that are asked for stay shut for the shortest time, whatever runs there now."

    def on(self, geometry: Geometry) -> LeastLostTime:
        """The same for every model."""
        return self

    def opens_empty_last(self, geometry: Geometry) -> bool:
        """Whether an empty GPU of a model is opened last."""
        return self.spares or whole_is_asked(geometry, self.asked_for)

    def score(self, gpu: GpuState, profile: Profile, start: int) -> tuple[bool, float]:
        """Whether the GPU is empty and opened last; then the size times the time that is lost.

        The sum is exact and rounded once, so equal costs tie.
        """
        geometry = gpu.geometry
        values = _values(geometry, self)
        new = profile.window(start)
        stranded = values.stranded
        newly = (stranded[gpu.mask | new] & ~stranded[gpu.mask]).bit_count()
        cost = values.stranding * newly
        for window, by_blockers in values.windows:
            if window & new:
                cost += by_blockers[gpu.blockers(window)]
        return gpu.mask == 0 and values.empty_last, cost / values.scale

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """What is lost, in slices times mean lifetimes."""
        empty, lost = key
        loss = f"places asked for stay shut for {lost:.3g} slice-lifetimes longer"
        return f"{loss} on an empty GPU, which is opened last" if empty else loss


@dataclass(frozen=True, slots=True)
class _Values:
    """The costs on a model as whole numbers, `scale` times as large."""

    windows: tuple[tuple[int, tuple[int, ...]], ...]
    """Each window and, by the number of instances in it, what it costs to shut it."""
    stranded: tuple[int, ...]
    """By mask: the slices that are free and of no use."""
    stranding: int
    empty_last: bool
    scale: int


@cached(256)
def _values(geometry: Geometry, policy: LeastLostTime) -> _Values:
    weights = dict(policy.weights)
    worth: dict[int, Fraction] = {}
    for profile in asked_profiles(geometry, policy.asked_for):
        value = profile.size * Fraction(weights.get(profile.name, 1))
        for start in profile.starts:
            window = profile.window(start)
            worth[window] = worth.get(window, Fraction(0)) + value
    stranding = Fraction(policy.stranding)
    denominators = (value.denominator for value in (*worth.values(), stranding))
    scale = lcm(*range(1, geometry.slices + 2)) * lcm(*denominators)
    counts = range(geometry.slices + 1)
    return _Values(
        tuple(
            (w, tuple(int(value * scale / (1 + k)) for k in counts)) for w, value in worth.items()
        ),
        stranded_slices(geometry, policy.asked_for),
        int(stranding * scale),
        policy.opens_empty_last(geometry),
        scale,
    )
