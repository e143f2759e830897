"""ParvaGPU's segment allocator: best fit by compute, and a fixed order of starts for each size.

Follows MunQ-Lee/ParvaGPU_SC24 (32d4890), ``src/allocator.c``: ``find_fit_gpu`` and
``find_fit_placement``. ParvaGPU knows all its instances beforehand and places the largest first;
here they come one by one. It never starts a 3g at 0, since it can always open another GPU; here 0
comes after 4. Starts that its order does not name come last, ascending.
"""

from __future__ import annotations

from slicewise.core.geometry import Profile
from slicewise.core.states import GpuState
from slicewise.policies.base import Preference, TablePolicy
from slicewise.policies.peers.first_match import first_open

_ORDER = {1: (0, 6, 4, 1, 2, 3, 5), 2: (0, 4, 2), 3: (4, 0)}
"""By compute slices; profiles of 4 and more have one start."""


class ParvaGpu(TablePolicy):
    """The GPU with the fewest compute slices to spare."""

    name = "peer-parvagpu"
    summary = "ParvaGPU: fewest free compute slices, starts in its own order (1g at 0, 6, 4, ...)."

    def prefer(self, gpu: GpuState, profile: Profile) -> Preference | None:
        """The fewer free compute slices the better."""
        start = first_open(gpu, profile, (*_ORDER.get(profile.compute, ()), *profile.starts))
        return None if start is None else Preference(gpu.free_compute, start)
