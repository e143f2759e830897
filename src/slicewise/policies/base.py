"""What a policy is: it names its choice for a GPU in a given state, and the index does the rest.

Most policies are *table policies*: how much they like a GPU depends only on the GPU's state and
the profile, so their preferences are computed once per state and a decision never scans GPUs.
Two kinds need more. A rotating pointer is a tie rule (`Ties.ROTATE`); cluster-wide counts choose
between tables (`AdaptivePolicy`). Both keep the constant time. Whatever else a policy wants, it
gets as a `ScanPolicy`: the whole cluster, at the price of a scan for every request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from slicewise.core.geometry import Geometry, Placement, Profile
from slicewise.core.request import Request
from slicewise.core.states import GpuState

if TYPE_CHECKING:  # names of policies are listed without NumPy
    from slicewise.core.cluster import Cluster

Key = Any
"""How much a policy likes a choice: anything that compares; lower is better."""


class Preference(NamedTuple):
    """A policy's choice on a GPU in some state."""

    key: Key
    """Lower is better; equal keys tie and the policy's tie rule decides between the GPUs."""
    start: int | None
    """Where to place; None means the GPU is picked all the same and the request is rejected."""


class Ties(StrEnum):
    """Which GPU is taken among those a policy likes equally."""

    LOWEST = "the lowest GPU id"
    ROTATE = "the next GPU in turn"


class Policy(ABC):
    """Chooses where a request goes."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for people."""

    def in_words(self, key: Key, geometry: Geometry) -> str:
        """What it makes of a choice on a GPU of this model, for people."""
        return f"a score of {key}"


class TablePolicy(Policy):
    """A policy whose preference is a pure function of the GPU's state and the profile."""

    ties: ClassVar[Ties] = Ties.LOWEST

    @abstractmethod
    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """The choice on a GPU in this state; None leaves such GPUs out."""


class ScorePolicy(TablePolicy):
    """A table policy that scores each feasible start; the lowest score wins, then lowest start."""

    @abstractmethod
    def score(self, gpu: GpuState, profile: Profile, start: int) -> Key:
        """What it costs to place ``profile`` at ``start`` of a GPU in this state."""

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """The cheapest feasible start."""
        scored = [
            (self.score(gpu, profile, start), start) for start in gpu.feasible_starts(profile)
        ]
        return Preference(*min(scored)) if scored else None


class AdaptivePolicy(Policy):
    """A policy that looks at cluster-wide counts to decide which table policy applies now.

    Decisions stay in constant time as long as the counts are (a cluster keeps its totals, and
    how many GPUs are in each state) and the table policies are few: rows are kept per table
    policy, so return the same object for the same situation.
    """

    @abstractmethod
    def table(self, cluster: Cluster) -> TablePolicy:
        """The table policy for the next decision."""


class Spot(NamedTuple):
    """A GPU and a placement on it."""

    gpu: int
    placement: Placement


class ScanPolicy(Policy):
    """A policy that looks at the whole cluster itself, request by request: the slow path."""

    @abstractmethod
    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        """Where the request goes, or None to reject it."""
