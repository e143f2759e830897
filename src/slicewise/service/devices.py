"""GPUs slice by slice, with as much about their tenants as the one who asks may know."""

from __future__ import annotations

from slicewise.control.reports import GpuView, InstanceView
from slicewise.control.state import NodeStanding, State
from slicewise.core.fragmentation import Reading, score_table
from slicewise.service.auth import Caller


def gpu_views(state: State, node: NodeStanding, caller: Caller) -> tuple[GpuView, ...]:
    """The GPUs of a node."""
    return tuple(gpu_view(state, node, index, caller) for index in range(len(node.gpus)))


def gpu_view(state: State, node: NodeStanding, index: int, caller: Caller) -> GpuView:
    """One GPU of a node."""
    gpu = node.gpus[index]
    mask = state.cluster.state(gpu).mask
    instances = []
    for instance in state.cluster.instances_on(gpu):
        identity = state.owner[instance.id]
        tenant = state.allocations[identity].tenant
        known = caller.sees(tenant)
        instances.append(
            InstanceView(
                profile=instance.profile,
                start=instance.start,
                size=instance.size,
                allocation=identity if known else None,
                tenant=tenant if known else None,
            )
        )
    return GpuView(
        node=node.name,
        gpu=index,
        mask=node.geometry.mask_text(mask),
        fragmentation=score_table(node.geometry, Reading.PARTIAL)[mask],
        instances=tuple(sorted(instances, key=lambda instance: instance.start)),
    )
