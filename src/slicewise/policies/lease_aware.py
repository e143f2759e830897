"""Lease-aware: least lost time, where the ends of instances are known.

`least-lost-time` takes it that nothing is known of when instances leave. Where ends are known, the
time that a placement keeps a window shut follows from them. Let y(t) = 1 - exp(-t/E) be the chance
that an instance of unknown end is gone after t, with E the mean lifetime; L when the new instance
leaves; R when the last of those in the window leaves whose ends are known; and u the number of
those whose ends are not. Then the expected extra time, the later the less it counts, is

    (y(L)^(u+1) - y(R)^(u+1)) / (u+1), and 0 if that is negative.

If nothing is known (L is infinite, R is 0) it is 1/(u+1): least lost time. If all is known it is
exp(-R/E) - exp(-L/E), nothing for a window that would be shut until later anyway.

An empty GPU is opened last by an instance whose end is not known, and only by such a one.

States are ranked by `least-lost-time`, since a state says nothing of times. The times then decide
among a bounded number of GPUs in the best states, so the work does not grow with the cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.states import GpuState
from slicewise.policies.base import Key, Preference, TablePolicy
from slicewise.policies.least_lost_time import LeastLostTime, LostTime

_BASE = LeastLostTime()


@dataclass(frozen=True)
class LeaseAware(TablePolicy):
    """Goes where the places asked for stay shut for the shortest time, as far as ends are known."""

    base: LostTime = _BASE
    """Ranks the states, and says what is asked for and what it counts."""
    mean_lifetime: float = 3600
    """How long an instance stays on average, in the unit of the times. It need not be exact."""
    per_state: int = 16
    """How many GPUs of a state are compared, lowest ids first."""
    most: int = 32
    """How many GPUs are compared in all, best states first."""

    def __post_init__(self) -> None:
        if not 0 < self.mean_lifetime < math.inf or self.per_state < 1 or self.most < 1:
            raise SlicewiseError(
                f"a mean lifetime of {self.mean_lifetime}, or {self.per_state} GPUs of a state and "
                f"{self.most} in all, is not positive"
            )

    name = "lease-aware"
    summary = "least-lost-time with the ends of leases, where they are known."

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """The choice if no end is known."""
        return self.base.prefer(gpu, profile)

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """What is lost if no end is known."""
        return self.base.in_words(key, geometry)
