"""First match: GPUs in order, and on each the starts in an order that is fixed beforehand.

Two systems place like this. They differ in the order of the starts only.

*NVIDIA's DRA driver* announces every possible instance of a GPU as a device of its own, and
kube-scheduler takes the first device that matches and does not overlap. The driver's devices are
sorted by name; a name ends in the start, so 1g lands on start 0 first. Follows
kubernetes-sigs/dra-driver-nvidia-gpu (main, 2026-08-07), ``cmd/gpu-kubelet-plugin/mig.go``
(``ToCanonicalName``) and ``driver.go``, and kubernetes/dynamic-resource-allocation (master,
2026-07-01), ``structured/internal/incubating``. Which node is tried first is decided by
scores that do not look at GPUs, and the order of a node's GPUs by generated names; both are taken
as the order of ids.

*The NVIDIA driver itself*, when it is asked for an instance without a start: the order that the
catalog has as ``preferred``. A tool that leaves the start to the driver and takes the first GPU
that does not refuse places like this.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from slicewise.core.geometry import Profile
from slicewise.core.states import GpuState
from slicewise.policies.base import Preference, TablePolicy


def first_open(gpu: GpuState, profile: Profile, order: Iterable[int]) -> int | None:
    """The first start of ``order`` that the hardware would accept now."""
    feasible = gpu.feasible_starts(profile)
    return next((start for start in order if start in feasible), None)


class _FirstMatch(TablePolicy):
    """The lowest GPU id with an open window; the subclasses say which start is tried first."""

    @abstractmethod
    def order(self, profile: Profile) -> Iterable[int]:
        """The starts, first choice first."""

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """All GPUs with an open window are alike."""
        start = first_open(gpu, profile, self.order(profile))
        return None if start is None else Preference(0, start)


class NvidiaDra(_FirstMatch):
    """The first free device in the order of names, as NVIDIA's DRA driver announces them."""

    name = "peer-nvidia-dra"
    summary = "NVIDIA DRA driver: lowest GPU id, first free device in the order of device names."

    def order(self, profile: Profile) -> Iterable[int]:
        """As names sort, which is by digits: 10 before 2."""
        return sorted(profile.starts, key=str)


class DriverDefault(_FirstMatch):
    """The first GPU with an open window, at the start the driver itself would take."""

    name = "peer-driver-default"
    summary = "NVIDIA driver left to itself: lowest GPU id, the driver's own order of starts."

    def order(self, profile: Profile) -> Iterable[int]:
        """As the driver tries them; ascending where that is not known."""
        return profile.start_order
