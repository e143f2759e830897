"""DAS, the Dynamic Accelerator Slicer of OpenShift, formerly InstaSlice.

Follows openshift/instaslice-operator (branch next, 2026-04-02),
``pkg/scheduler/plugins/mig/mig.go``: ``Filter`` takes a node's GPUs in listed order and the first
legal start, ``Score`` prefers the node that would have the most free slots left, in whole
percent. Two things are left out: a GPU on which another tenant's claim is being made is skipped
there, and other plugins of the scheduler have a say in the choice of the node.
"""

from __future__ import annotations

from collections.abc import Sequence

from slicewise.core.geometry import Placement
from slicewise.core.states import GpuState
from slicewise.policies.fits import FirstFit
from slicewise.policies.peers.node_first import NodeFirst


class Das(NodeFirst):
    """The emptiest node; on it the first GPU with an open window, lowest start."""

    name = "peer-das"
    summary = "DAS (InstaSlice): node with the most free slots, then first GPU, lowest start."
    on_node = FirstFit

    def node_key(self, gpus: Sequence[GpuState], placement: Placement) -> int:
        """The more slots are left the better, in whole percent."""
        slots = sum(gpu.geometry.slices for gpu in gpus)
        left = sum(gpu.free_slices for gpu in gpus) - placement.profile.size
        return -(100 * left // slots)
