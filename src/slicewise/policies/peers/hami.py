"""HAMi with dynamic MIG: full nodes first, the emptiest GPU there, and three rules for the start.

Nodes and GPUs follow Project-HAMi/HAMi 2.10.0 with the chart's defaults (nodes ``binpack``, GPUs
``spread``): ``pkg/scheduler/policy/node_policy.go``, ``gpu_policy.go`` and
``pkg/device/nvidia/device.go``. The starts follow ``pkg/device/nvidia/mig_topology.go`` in the
three forms it has had: as released in 2.10.0, as first proposed in pull request 2855, and as that
was merged after 2.10.0.

HAMi measures load by memory, compute and the number of tenants; the last is not part of a GPU's
state and is left out here. There a tenant asks for memory and gets the smallest profile that has
it; here it gets the profile it names. HAMi's list of allowed profiles is taken to be all plain
ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from slicewise.core.geometry import Geometry, Placement, Profile
from slicewise.core.states import GpuState
from slicewise.policies.base import Key, Preference, TablePolicy
from slicewise.policies.peers.node_first import NodeFirst


class _Spread(TablePolicy):
    """The GPU with the least load; the subclasses say which start."""

    @abstractmethod
    def start_key(self, gpu: GpuState, profile: Profile, start: int) -> Key:
        """Lower is better."""

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        feasible = gpu.feasible_starts(profile)
        if not feasible:
            return None
        start = min(feasible, key=lambda start: self.start_key(gpu, profile, start))
        return Preference(_load([gpu]), start)


def _load(gpus: Sequence[GpuState]) -> Fraction:
    """How much is taken: the shares of compute and of memory together."""
    slices = sum(gpu.geometry.slices for gpu in gpus)
    compute = sum(gpu.geometry.compute for gpu in gpus)
    taken = slices - sum(gpu.free_slices for gpu in gpus)
    busy = compute - sum(gpu.free_compute for gpu in gpus)
    return Fraction(taken, slices) + Fraction(busy, compute)


class _FromOneEnd(_Spread):
    """Profiles 1g and 3g from the highest start down, all others from the lowest up."""

    def start_key(self, gpu: GpuState, profile: Profile, start: int) -> int:
        return -start if profile.name.startswith(("1g.", "3g.")) else start


class _LongestRun(_Spread):
    """The start that leaves the longest free run, then the most legal placements."""

    def start_key(self, gpu: GpuState, profile: Profile, start: int) -> tuple[int, int, int]:
        taken = gpu.mask | profile.window(start)
        runs = gpu.geometry.mask_text(taken).split("1")
        survivors = sum(not placement.window & taken for placement in _plain(gpu.geometry))
        return -max(map(len, runs)), -survivors, start


class _Halves(_Spread):
    """The start that keeps a half of the GPU empty, then one in the half meant for its size."""

    def start_key(self, gpu: GpuState, profile: Profile, start: int) -> tuple[int, int, int, int]:
        taken = gpu.mask | profile.window(start)
        regions = _regions(gpu.geometry)
        empty = sum(not region.mask & taken for region in regions)
        mismatch = from_middle = 0
        # A card that cannot be halved is one region, and its starts are told apart by number only.
        for region in regions if len(regions) > 1 else ():
            if region.holds(start, profile.size):
                mismatch = (profile.size == region.size) != region.for_large
                from_middle = region.from_middle(start, profile.size)
        return -empty, mismatch, -from_middle, start


class _Region(NamedTuple):
    """A half of a GPU, or all of it."""

    start: int
    end: int
    for_large: bool
    """Whether it is kept for profiles as large as itself."""

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def mask(self) -> int:
        return (1 << self.end) - (1 << self.start)

    def holds(self, start: int, size: int) -> bool:
        """Whether a window lies in the region."""
        return self.start <= start and start + size <= self.end

    def from_middle(self, start: int, size: int) -> int:
        """How far a window in this half is from the middle of the GPU."""
        return start - self.start if self.start else self.end - start - size


def _regions(geometry: Geometry) -> tuple[_Region, ...]:
    """The two halves; the one with fewer legal placements (the upper, if equal) is for large."""
    middle = geometry.slices // 2
    bounds = ((0, middle), (middle, geometry.slices))
    placements = _plain(geometry)
    low, high = (
        sum(start <= p.start and p.start + p.profile.size <= end for p in placements)
        for start, end in bounds
    )
    whole = sum(p.profile.size == geometry.slices for p in placements)
    if low + high + whole < len(placements):  # some window lies across the middle
        return (_Region(0, geometry.slices, True),)
    return (_Region(*bounds[0], low < high), _Region(*bounds[1], high <= low))


def _plain(geometry: Geometry) -> list[Placement]:
    return [p for p in geometry.placements if p.profile.variant_of is None]


class _Hami(NodeFirst):
    """The fullest node with an open window."""

    def node_key(self, gpus: Sequence[GpuState], placement: Placement) -> Fraction:
        """The more is taken the better."""
        return -_load(gpus)


class Hami(_Hami):
    """HAMi 2.10.0."""

    name = "peer-hami"
    summary = "HAMi 2.10: fullest node, its emptiest GPU, 1g and 3g from above, others from below."
    on_node = _FromOneEnd


class HamiScored(_Hami):
    """HAMi with starts as first proposed in pull request 2855."""

    name = "peer-hami-scored"
    summary = "HAMi, starts as proposed: longest free run left, then most legal placements left."
    on_node = _LongestRun


class HamiRegions(_Hami):
    """HAMi with starts as merged by pull request 2855."""

    name = "peer-hami-regions"
    summary = "HAMi, starts as merged: keep a half empty, large profiles above, small ones below."
    on_node = _Halves
