"""First-, best- and worst-fit: pick the GPU by its free room, then the first start that works.

The paper ran them *strict*: the GPU is picked by free compute and memory alone, and when no
legal window is open on it the request is rejected without trying another. The *feasible* forms
prefer the same GPUs among those with an open window, as a real scheduler would.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from slicewise.core.geometry import Profile
from slicewise.core.states import GpuState
from slicewise.policies.base import Preference, TablePolicy


class _Fit(TablePolicy):
    """Prefers GPUs by their free room; the subclasses say which."""

    strict = False
    best_index = False
    """Starts in the driver's preferred order instead of ascending."""

    @abstractmethod
    def room_key(self, gpu: GpuState) -> int:
        """Lower is better."""

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        start = first_feasible(gpu, profile, self.best_index)
        if start is None and not (self.strict and has_room(gpu, profile)):
            return None
        return Preference(self.room_key(gpu), start)


def has_room(gpu: GpuState, profile: Profile) -> bool:
    """Whether enough compute and memory is free, wherever it may lie."""
    return gpu.free_slices >= profile.size and gpu.free_compute >= profile.compute


def first_feasible(gpu: GpuState, profile: Profile, best_index: bool) -> int | None:
    """The first start that works, ascending or in the driver's preferred order."""
    order: Iterable[int] = profile.start_order if best_index else profile.starts
    feasible = gpu.feasible_starts(profile)
    return next((start for start in order if start in feasible), None)


class FirstFit(_Fit):
    """The lowest GPU id with an open window."""

    name = "first-fit"
    summary = "Lowest GPU id with an open window, lowest start."

    def room_key(self, gpu: GpuState) -> int:
        """All GPUs are alike."""
        return 0


class FirstFitStrict(FirstFit):
    """First-fit as published (FF)."""

    name = "first-fit-strict"
    summary = (
        "FF as published: lowest GPU id with enough room, rejected if no window is open there."
    )
    strict = True


class BestFit(_Fit):
    """The fullest GPU with an open window."""

    name = "best-fit"
    summary = "Fewest free slices among GPUs with an open window, starts in the driver's order."
    best_index = True

    def room_key(self, gpu: GpuState) -> int:
        """The fewer free slices the better."""
        return gpu.free_slices


class BestFitStrict(BestFit):
    """Best-fit, best-index as published (BF-BI)."""

    name = "best-fit-strict"
    summary = "BF-BI as published: fewest free slices by room alone, rejected if no window is open."
    strict = True


class WorstFit(_Fit):
    """The emptiest GPU with an open window."""

    name = "worst-fit"
    summary = "Most free slices among GPUs with an open window, starts in the driver's order."
    best_index = True

    def room_key(self, gpu: GpuState) -> int:
        """The more free slices the better."""
        return -gpu.free_slices


class WorstFitStrict(WorstFit):
    """Worst-fit, best-index as published (WF-BI)."""

    name = "worst-fit-strict"
    summary = "WF-BI as published: most free slices by room alone, rejected if no window is open."
    strict = True
