"""The cluster as a whole, and the models and policies there are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from slicewise.control.answers import Answer, said
from slicewise.control.entries import AllocationRecord
from slicewise.control.hardware import Phase
from slicewise.control.reports import (
    ClusterView,
    Fragmentation,
    GpuView,
    InstanceView,
    ModelList,
    ModelView,
    PolicyList,
    PolicyView,
    ProfileView,
)
from slicewise.control.state import NodeStanding
from slicewise.control.views import node_view
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Geometry
from slicewise.policies.registry import DEFAULT, policy_class, policy_names
from slicewise.service.auth import Caller
from slicewise.service.devices import foreign_instances
from slicewise.service.http import Query, Reply, Request, reply
from slicewise.service.site import Site


class ClusterQuery(Query, frozen=True):
    """What to say about the cluster."""

    gpus: bool = False


async def cluster(site: Site, request: Request) -> Reply:
    """Totals, models and nodes; every GPU where asked for."""
    query = request.query(ClusterQuery)
    view = overview(site)
    if not query.gpus:
        return reply(said(200, view))
    # Records do not change, so this is the cluster at one moment: the rest can take its time,
    # and others need not wait for it.
    state = site.state
    nodes = [_node(n) for n in state.nodes.values()]
    records = [*state.allocations.values(), *state.leaving.values()]

    def finish() -> Answer:
        devices = all_devices(nodes, records, request.caller)
        return said(200, _with_devices(view, devices))

    return reply(await site.plant.in_thread(finish))


def overview(site: Site) -> ClusterView:
    """The cluster without its single GPUs."""
    state = site.state
    nodes = tuple(state.nodes.values())
    views = (
        node_view(state, node, taken)
        for node, taken in zip(nodes, site.capacity.taken(nodes), strict=True)
    )
    whole = state.cluster
    return ClusterView(
        seq=state.seq,
        policy=state.scheduler.policy.name,
        gpus=whole.gpus,
        active_gpus=whole.active_gpus,
        slices=whole.slices,
        free_slices=whole.free_slices,
        instances=sum(node.instances for node in nodes),
        waiting=len(state.waiting),
        fragmentation=Fragmentation(
            partial=whole.fragmentation(Reading.PARTIAL),
            overlap=whole.fragmentation(Reading.OVERLAP),
        ),
        models=site.capacity.models(),
        nodes=tuple(sorted(views, key=lambda view: view.name)),
        devices=None,
    )


def _with_devices(view: ClusterView, devices: tuple[GpuView, ...]) -> ClusterView:
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    return ClusterView(**(fields | {"devices": devices}))


class _Node(NamedTuple):
    """What there is to know of a node, once and for all."""

    name: str
    geometry: Geometry
    gpus: int
    holds: dict[int, dict[str, str]]
    """By GPU that is held: why."""
    foreign: dict[int, list[InstanceView]]
    """By GPU: what is nobody's."""


def _node(node: NodeStanding) -> _Node:
    agent = node.agent
    if agent is None:
        return _Node(node.name, node.geometry, len(node.gpus), {}, {})
    gpus = {found.gpu for found in agent.foreign.values()}
    foreign = {gpu: foreign_instances(agent, gpu) for gpu in gpus}
    return _Node(node.name, node.geometry, len(node.gpus), dict(agent.gpu_holds), foreign)


def all_devices(
    nodes: Sequence[_Node], records: Sequence[AllocationRecord], caller: Caller
) -> tuple[GpuView, ...]:
    """Every GPU slice by slice, from the records alone."""
    on: defaultdict[tuple[str, int], list[InstanceView]] = defaultdict(list)
    for record in records:
        known = caller.sees(record.tenant)
        for part in record.parts:
            if part.phase is Phase.GONE or (part.phase is None and record.ended is not None):
                continue
            on[part.node, part.gpu].append(
                InstanceView(
                    profile=part.profile,
                    start=part.start,
                    size=part.size,
                    allocation=record.id if known else None,
                    tenant=record.tenant if known else None,
                    phase=part.phase,
                )
            )
    devices = []
    for node in sorted(nodes, key=lambda node: node.name):
        scores = score_table(node.geometry, Reading.PARTIAL)
        for index in range(node.gpus):
            there = [*on[node.name, index], *node.foreign.get(index, ())]
            instances = sorted(there, key=lambda instance: instance.start)
            mask = sum(((1 << i.size) - 1) << i.start for i in instances)
            devices.append(
                GpuView(
                    node=node.name,
                    gpu=index,
                    mask=node.geometry.mask_text(mask),
                    fragmentation=scores[mask],
                    instances=tuple(instances),
                    holds=node.holds.get(index, {}),
                )
            )
    return tuple(devices)


async def models(site: Site, request: Request) -> Reply:
    """The GPU models known, and which of them are in use."""
    in_use = {node.geometry.model for node in site.state.nodes.values()}
    views = []
    for entry in site.catalog.entries():
        geometry = site.state.geometries.get(entry.model) or entry.geometry
        views.append(
            ModelView(
                name=entry.model,
                aliases=entry.aliases,
                memory_gb=entry.memory_gb,
                slices=entry.memory_slices,
                compute_slices=entry.compute_slices,
                in_use=entry.model in in_use,
                refusal=entry.refusal,
                profiles=_profiles(geometry) if geometry is not None else (),
                budgets={b.name: b.total for b in geometry.budgets} if geometry else {},
            )
        )
    return reply(said(200, ModelList(models=tuple(views))))


def _profiles(geometry: Geometry) -> tuple[ProfileView, ...]:
    return tuple(
        ProfileView(
            name=profile.name,
            size=profile.size,
            compute=profile.compute,
            memory_gb=profile.memory_gb,
            starts=profile.starts,
            variant_of=profile.variant_of,
            uses=dict(profile.uses),
        )
        for profile in geometry.profiles
    )


async def policies(site: Site, request: Request) -> Reply:
    """The policies known, and which of them places here."""
    used = site.settings.policy
    used = DEFAULT if used == "default" else used
    views = tuple(
        PolicyView(name=name, summary=policy_class(name).summary, in_use=name == used)
        for name in policy_names()
    )
    return reply(said(200, PolicyList(policies=views)))
