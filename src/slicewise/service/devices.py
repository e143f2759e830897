"""GPUs slice by slice, with as much about their tenants as the one who asks may know."""

from __future__ import annotations

import msgspec

from slicewise.control.agent_wire import AgentView
from slicewise.control.agents import MIG, MISSING, UNKNOWN
from slicewise.control.hardware import Phase
from slicewise.control.reports import GpuDetail, GpuView, InstanceView
from slicewise.control.standings import AgentStanding
from slicewise.control.state import NodeStanding, State
from slicewise.control.views import foreign_view
from slicewise.control.wire import moment
from slicewise.core.fragmentation import Reading, score_table
from slicewise.service.auth import Caller
from slicewise.service.contacts import Contacts


def gpu_views(
    state: State, node: NodeStanding, caller: Caller, contacts: Contacts | None = None
) -> tuple[GpuView, ...]:
    """The GPUs of a node; with contacts, also what only the agent knows."""
    return tuple(_gpu_view(state, node, index, caller, contacts) for index in range(len(node.gpus)))


def _gpu_view(
    state: State, node: NodeStanding, index: int, caller: Caller, contacts: Contacts | None
) -> GpuView:
    gpu, agent = node.gpus[index], node.agent
    mask = state.cluster.state(gpu).mask
    instances = []
    for instance in state.cluster.instances_on(gpu):
        identity = state.owner.get(instance.id)
        if identity is None:
            continue
        record = state.record(identity)
        number = state.instances[identity].index(instance.id)
        known = caller.sees(record.tenant)
        memory = contacts.memory(node.name, identity, number) if contacts and known else None
        instances.append(
            InstanceView(
                profile=instance.profile,
                start=instance.start,
                size=instance.size,
                allocation=identity if known else None,
                tenant=record.tenant if known else None,
                phase=record.parts[number].phase,
                memory_used=memory,
            )
        )
    instances += foreign_instances(agent, index)
    return GpuView(
        node=node.name,
        gpu=index,
        mask=node.geometry.mask_text(mask),
        fragmentation=score_table(node.geometry, Reading.PARTIAL)[mask],
        instances=tuple(sorted(instances, key=lambda instance: instance.start)),
        holds=agent.gpu_holds.get(index, {}) if agent is not None else {},
    )


def gpu_details(
    state: State, node: NodeStanding, caller: Caller, contacts: Contacts
) -> tuple[GpuDetail, ...]:
    """The GPUs of a node, with what its agent says about them."""
    views = gpu_views(state, node, caller, contacts)
    return tuple(_gpu_detail(node, view, caller, contacts) for view in views)


def _gpu_detail(node: NodeStanding, view: GpuView, caller: Caller, contacts: Contacts) -> GpuDetail:
    agent = node.agent
    plain = msgspec.structs.asdict(view)
    if agent is None:
        return GpuDetail(**plain)
    uuid = agent.gpus[view.gpu]
    figures = contacts.figures(node.name, uuid)
    strangers = tuple(
        foreign_view(name, found, name in agent.evicted)
        for name, found in agent.foreign.items()
        if found.gpu == view.gpu and caller.sees_all
    )
    return GpuDetail(
        **plain,
        uuid=uuid,
        mig=None if MISSING in view.holds else MIG not in view.holds,
        foreign=strangers,
        quarantined=sum(one.phase == Phase.QUARANTINED for one in view.instances),
        temperature=figures.temperature,
        memory_used=figures.memory_used,
    )


def foreign_instances(agent: AgentStanding | None, index: int) -> list[InstanceView]:
    """What is on a GPU and takes slices though it is no allocation's."""
    return [
        InstanceView(
            profile=found.profile,
            start=found.start,
            size=found.size,
            allocation=None,
            tenant=None,
            phase=found.why,
        )
        for found in (agent.foreign.values() if agent is not None else ())
        if found.gpu == index and found.blocks
    ]


def agent_view(node: NodeStanding, contacts: Contacts) -> AgentView | None:
    """The agent of a node, if it has one."""
    agent = node.agent
    if agent is None:
        return None
    return AgentView(
        session=agent.session,
        since=moment(agent.since) or "",
        version=agent.version,
        driver=agent.driver,
        boot=agent.boot,
        reachable=UNKNOWN not in node.holds,
        last_contact=moment(contacts.last(node.name)),
    )
