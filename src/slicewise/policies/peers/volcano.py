"""Volcano's vGPU with dynamic MIG: a GPU takes on one of a few templates, whole, and keeps it.

Follows volcano-sh/volcano (master, 2026-08-20), ``pkg/scheduler/api/devices/nvidia/vgpu/mig.go``
(``findMatch``) and ``utils.go`` (``binpack``), and the templates of ``docs/design/dynamic-mig.md``:
one profile as often as it fits, the rest filled with the smallest. Those it publishes leave out
4g and 1g.20gb, which get theirs by the same rule; profiles such as ``+me`` get none.

The first template that offers the profile is taken when the GPU is empty, and from then on only
its free instances are given out, until the GPU is empty again. There a tenant asks for memory and
may be given a larger instance of the template; here it gets the profile it names or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from slicewise.core.cluster import Cluster
from slicewise.core.geometry import Geometry, Placement, Profile
from slicewise.core.request import Request
from slicewise.core.states import GpuState, empty_state
from slicewise.core.tables import cached
from slicewise.policies.base import Key, ScanPolicy, Spot

Template = tuple[Placement, ...]
"""The instances a GPU is cut into, those of one profile by ascending start."""


@cached(256)
def templates(geometry: Geometry) -> tuple[Template, ...]:
    """A model's templates, the one of the smallest profile first."""
    plain = sorted(geometry.plain_profiles, key=lambda profile: (profile.size, profile.compute))
    return tuple(dict.fromkeys(_cut(geometry, (profile, plain[0])) for profile in plain))


def _cut(geometry: Geometry, profiles: Iterable[Profile]) -> Template:
    """As many of the first profile as fit, then as many of the next."""
    state = empty_state(geometry)
    cut: list[Placement] = []
    for profile in profiles:
        for placement in geometry.placements:
            if placement.profile is profile and _open(state, placement):
                state = state.after(placement)
                cut.append(placement)
    return tuple(cut)


def _open(gpu: GpuState, placement: Placement) -> bool:
    return not placement.window & gpu.mask and gpu.within_budgets(placement.profile)


class Volcano(ScanPolicy):
    """The fullest GPU whose template has the profile free, else an empty GPU.

    Which template a GPU took cannot always be seen from what is left on it, so it is remembered;
    for GPUs that were filled by other policies it is the first that fits what is there.
    """

    name = "peer-volcano"
    summary = "Volcano vGPU: fullest GPU whose template has the profile free; templates stay."

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._taken: dict[int, Template | None] = {}

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        """The first free instance of the template, lowest start."""
        if self._cluster is not cluster:
            self._cluster, self._taken = cluster, {}
        wanted = {model: request.candidates(model) for model in cluster.models}
        best: tuple[Key, Spot, Template] | None = None
        for gpu in cluster.schedulable:
            state = cluster.states[cluster.state_of[gpu]]
            free = state.free_slices
            for waste, profile in wanted[state.geometry]:
                key = waste, free, gpu
                if profile.size > free or (best is not None and best[0] < key):
                    continue
                found = _first_free(state, profile, self._offered(cluster, gpu, state))
                if found is not None:
                    best = key, Spot(gpu, found[0]), found[1]
        if best is None:
            return None
        _, spot, self._taken[spot.gpu] = best
        return spot

    def _offered(self, cluster: Cluster, gpu: int, state: GpuState) -> tuple[Template, ...]:
        """The templates a GPU can serve from: all when it is empty, else the one it took."""
        every = templates(state.geometry)
        if not state.mask:
            return every
        if gpu not in self._taken:
            here = {
                state.geometry.placement(instance.profile, instance.start)
                for instance in cluster.instances()
                if instance.gpu == gpu
            }
            self._taken[gpu] = next((template for template in every if here <= {*template}), None)
        template = self._taken[gpu]
        return () if template is None else (template,)


def _first_free(
    gpu: GpuState, profile: Profile, offered: Iterable[Template]
) -> tuple[Placement, Template] | None:
    for template in offered:
        for placement in template:
            if placement.profile is profile and _open(gpu, placement):
                return placement, template
    return None
