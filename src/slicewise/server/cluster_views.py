"""Views of the cluster and its GPUs, limited to what a caller may see; and the cluster as JSON."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from slicewise.api.agents import AgentView
from slicewise.api.base import Fragmentation, encode, moment
from slicewise.api.cluster import ClusterView
from slicewise.api.nodes import GpuDetail, GpuView, InstanceView, ReservedView
from slicewise.control.agents import MIG, MISSING, UNKNOWN
from slicewise.control.state import NodeStatus, State
from slicewise.control.status import AgentStatus
from slicewise.control.views import foreign_view, node_view
from slicewise.core.fragmentation import Reading, score_table
from slicewise.journal.agent_entries import Phase
from slicewise.journal.entries import TenantRef
from slicewise.runtime.agent_liveness import AgentLiveness
from slicewise.server.auth import Caller
from slicewise.server.capacity import FreeCapacity

MAX_SCOPES = 16
"""Scopes kept as JSON. Each takes 3 MB for a cluster of 10,000 GPUs."""
GROUP_GPUS = 128
"""GPUs encoded together before other requests get a turn."""

_END = b'"nodes":[],"devices":null}'
"""The end of a ClusterView without nodes and GPUs."""


def gpu_views(
    state: State, node: NodeStatus, caller: Caller, liveness: AgentLiveness | None = None
) -> tuple[GpuView, ...]:
    """The GPUs of a node; ``liveness`` adds the memory in use that the agent reported."""
    return tuple(_gpu_view(state, node, index, caller, liveness) for index in range(len(node.gpus)))


def _gpu_view(
    state: State, node: NodeStatus, index: int, caller: Caller, liveness: AgentLiveness | None
) -> GpuView:
    gpu, agent = node.gpus[index], node.agent
    mask = state.cluster.state(gpu).mask
    instances = []
    for instance in state.cluster.instances_on(gpu):
        identity = state.owner.get(instance.id)
        if identity is None:  # a foreign instance
            continue
        record = state.record(identity)
        number = state.instances[identity].index(instance.id)
        visible = caller.sees(record.tenant)
        memory = liveness.memory(node.name, identity, number) if liveness and visible else None
        instances.append(
            InstanceView(
                profile=instance.profile,
                start=instance.start,
                size=instance.size,
                allocation=identity if visible else None,
                tenant=record.tenant.name if visible else None,
                phase=record.parts[number].phase,
                memory_used=memory,
            )
        )
    instances += _foreign_instances(agent, index)
    return GpuView(
        node=node.name,
        gpu=index,
        mask=node.geometry.mask_text(mask),
        fragmentation=score_table(node.geometry, Reading.PARTIAL)[mask],
        instances=tuple(sorted(instances, key=lambda instance: instance.start)),
        holds=agent.gpu_holds.get(index, {}) if agent is not None else {},
        reserved=reserved_view(state, gpu, caller),
    )


def reserved_view(state: State, gpu: int, caller: Caller) -> ReservedView | None:
    """The window that is reserved on a GPU, if one is; for whom, only if the caller may see it."""
    held = state.reservations.on(gpu)
    if held is None:
        return None
    line, window = held
    node = state.cluster.node_of(gpu)
    placement = node.geometry.placements[window.placement]
    tenant = state.tenants[line.tenant].ref
    visible = caller.sees(tenant)
    return ReservedView(
        node=node.name,
        gpu=gpu - node.gpus.start,
        start=placement.start,
        size=placement.profile.size,
        tenant=tenant.name if visible else None,
        profile=placement.profile.name if visible else None,
        count=line.instances if visible else None,
        opens_at=moment(window.opens) if visible else None,
    )


def gpu_details(
    state: State, node: NodeStatus, caller: Caller, liveness: AgentLiveness
) -> tuple[GpuDetail, ...]:
    """The GPUs of a node, with the details that its agent reported."""
    views = gpu_views(state, node, caller, liveness)
    return tuple(_gpu_detail(node, view, caller, liveness) for view in views)


def _gpu_detail(
    node: NodeStatus, view: GpuView, caller: Caller, liveness: AgentLiveness
) -> GpuDetail:
    agent = node.agent
    plain = msgspec.structs.asdict(view)
    if agent is None:
        return GpuDetail(**plain)
    uuid = agent.gpus[view.gpu]
    figures = liveness.figures(node.name, uuid)
    foreign = tuple(
        foreign_view(name, found, name in agent.evicted)
        for name, found in agent.foreign.items()
        if found.gpu == view.gpu and caller.sees_all
    )
    return GpuDetail(
        **plain,
        uuid=uuid,
        mig=None if MISSING in view.holds else MIG not in view.holds,
        foreign=foreign,
        quarantined=sum(one.phase == Phase.QUARANTINED for one in view.instances),
        # What the jobs of all tenants on the GPU do, taken together.
        temperature=figures.temperature if caller.sees_all else None,
        memory_used=figures.memory_used if caller.sees_all else None,
    )


def _foreign_instances(agent: AgentStatus | None, index: int) -> list[InstanceView]:
    """Instances that occupy slices of a GPU without an allocation."""
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


def agent_view(node: NodeStatus, liveness: AgentLiveness) -> AgentView | None:
    """The agent of a node; None without one."""
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
        last_contact=moment(liveness.last(node.name)),
    )


def waiting_for(state: State, tenant: TenantRef | None) -> int:
    """The number of queued requests, of a tenant or of all."""
    if tenant is None:
        return len(state.waiting)
    found = state.tenants.get(tenant.id)
    return 0 if found is None else found.waiting


def cluster_view(state: State, capacity: FreeCapacity, history: str = "") -> ClusterView:
    """The totals of the cluster, without nodes and GPUs, as a caller without a tenant sees them."""
    whole = state.cluster
    return ClusterView(
        seq=state.seq,
        history=history,
        policy=state.scheduler.policy.name,
        gpus=whole.gpus,
        active_gpus=whole.active_gpus,
        slices=whole.slices,
        free_slices=whole.free_slices,
        instances=sum(node.instances for node in state.nodes.values()),
        waiting=len(state.waiting),
        fragmentation=Fragmentation(
            partial=whole.fragmentation(Reading.PARTIAL),
            overlap=whole.fragmentation(Reading.OVERLAP),
        ),
        models=capacity.models(),
        nodes=(),
        devices=None,
    )


_Encoded = tuple[int, list[bytes]]
"""The journal entry that a document reflects, and the document in pieces."""


class _Group:
    """A group of nodes, with the JSON of each at the version that was last encoded."""

    __slots__ = ("_prefix", "_texts", "_versions", "nodes", "text")

    def __init__(self, nodes: Sequence[NodeStatus], prefix: bytes) -> None:
        """``prefix`` separates the group from the preceding one."""
        self.nodes = nodes
        self.text = b""
        self._prefix = prefix
        self._versions = [-1] * len(nodes)
        self._texts = [b""] * len(nodes)

    def refresh(self, encode_node: Callable[[NodeStatus], bytes]) -> bool:
        """Encode the nodes that have changed; return whether there were any."""
        stale = False
        for at, node in enumerate(self.nodes):
            if node.version != self._versions[at]:
                self._versions[at] = node.version
                self._texts[at] = encode_node(node)
                stale = True
        if stale:
            self.text = self._prefix + b",".join(self._texts)
        return stale


class _NodeJson:
    """The JSON of all nodes, ordered by name, for one scope."""

    def __init__(self, state: State, encode_node: Callable[[NodeStatus], bytes]) -> None:
        self._state = state
        self._encode_node = encode_node
        self._layout = -1
        self._groups: list[_Group] = []
        self.last: _Encoded = -1, []
        """The last complete document."""

    async def prepare(self, pace: Callable[[], Awaitable[None]]) -> None:
        """Encode what has changed; other requests run between the groups."""
        self._arrange()
        for group in self._groups:
            if group.refresh(self._encode_node):
                await pace()

    def all(self) -> list[bytes]:
        """The current JSON in pieces; encodes what has changed since ``prepare``."""
        self._arrange()
        for group in self._groups:
            group.refresh(self._encode_node)
        return [group.text for group in self._groups]

    def _arrange(self) -> None:
        """Put the nodes into groups, again when nodes were added or removed."""
        if self._layout != self._state.layout:
            self._layout = self._state.layout
            self._groups = []
            nodes: list[NodeStatus] = []
            for node in sorted(self._state.nodes.values(), key=lambda node: node.name):
                if nodes and sum(len(n.gpus) for n in nodes) + len(node.gpus) > GROUP_GPUS:
                    self._add(nodes)
                    nodes = []
                nodes.append(node)
            if nodes:
                self._add(nodes)

    def _add(self, nodes: Sequence[NodeStatus]) -> None:
        self._groups.append(_Group(nodes, b"," if self._groups else b""))


class ClusterJson:
    """The cluster as JSON; only nodes that changed since the last request are encoded again.

    Encoding 10,000 GPUs takes 0.1 s of the event loop. A caller sees the tenants of its scope only,
    so the JSON of GPUs is kept by scope: one for callers that see all tenants, and one for each
    tenant that asked recently. The JSON of nodes is the same for all. The totals are encoded for
    each answer, since a tenant may count no queued requests but its own.
    """

    def __init__(self, state: State, capacity: FreeCapacity, history: str = "") -> None:
        self._state = state
        self._history = history
        self._capacity = capacity
        self._nodes = _NodeJson(state, lambda node: encode(node_view(state, node)))
        self._devices: OrderedDict[TenantRef | None, _NodeJson] = OrderedDict()
        self._plain: _Encoded = -1, []
        """The last document without totals and GPUs."""
        self._totals: ClusterView | None = None

    async def document(
        self, caller: Caller, devices: bool, pace: Callable[[], Awaitable[None]]
    ) -> _Encoded:
        """A `ClusterView` as JSON in pieces, and the journal entry that it reflects."""
        gpus = self._scope(caller) if devices else None
        last = self._plain if gpus is None else gpus.last
        if last[0] != self._state.seq:
            await self._nodes.prepare(pace)
            if gpus is not None:
                await gpus.prepare(pace)
            # No await below: all pieces reflect the same entry.
            last = self._join(gpus)
        seq, pieces = last
        return seq, [self._head(caller.tenant), *pieces]

    def _join(self, gpus: _NodeJson | None) -> _Encoded:
        """Keep and return the current document without totals."""
        if gpus is None:
            self._plain = self._state.seq, [*self._nodes.all(), b'],"devices":null}']
            return self._plain
        gpus.last = self._state.seq, [*self._nodes.all(), b'],"devices":[', *gpus.all(), b"]}"]
        return gpus.last

    def _scope(self, caller: Caller) -> _NodeJson:
        tenant, state = caller.tenant, self._state
        found = self._devices.get(tenant)
        if found is None:
            found = _NodeJson(state, lambda node: encode(gpu_views(state, node, caller))[1:-1])
            self._devices[tenant] = found
            if len(self._devices) > MAX_SCOPES:
                self._devices.popitem(last=False)
        self._devices.move_to_end(tenant)
        return found

    def _head(self, tenant: TenantRef | None) -> bytes:
        """The document up to the list of nodes."""
        totals = self._totals
        if totals is None or totals.seq != self._state.seq:
            totals = self._totals = cluster_view(self._state, self._capacity, self._history)
        own = msgspec.structs.replace(totals, waiting=waiting_for(self._state, tenant))
        text = encode(own)
        assert text.endswith(_END)
        return text[: -len(_END)] + b'"nodes":['
