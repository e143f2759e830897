"""The state of the service: the result of applying the journal's entries in order.

The commit loop decides on one State. Every process keeps another one, the replica, which follows
the committed rows and answers reads.

Entries about allocations are applied in `allocation_state`, those that agents cause in
`agent_state`; all others here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from slicewise.control.agent_state import AgentEntries, as_gone
from slicewise.control.allocation_index import AllocationIndex
from slicewise.control.allocation_state import AllocationEntries
from slicewise.control.geometries import geometry_of
from slicewise.control.status import NodeStatus as NodeStatus
from slicewise.control.status import TenantStatus as TenantStatus
from slicewise.control.status import request_of as request_of
from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Need, Request
from slicewise.core.tables import drop_tables
from slicewise.engine.queue import Discipline, WaitingRoom
from slicewise.engine.scheduler import Scheduler
from slicewise.journal.agent_entries import Phase
from slicewise.journal.entries import (
    AllocationRecord,
    ClockSet,
    Entry,
    ModelEntered,
    ModelForgotten,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
    Part,
    Rejected,
    Row,
    Seconds,
    TenantRemoved,
    TenantSet,
    TokenExpiring,
    TokenIssued,
    TokenRevoked,
)


class State:
    """Nodes, tenants, tokens, allocations and the queue."""

    def __init__(
        self,
        policy: str = "default",
        discipline: Discipline | None = None,
        index: AllocationIndex | None = None,
    ) -> None:
        self.seq = 0
        """The sequence number of the last entry applied."""
        self.at: Seconds = 0.0
        """Service time of that entry. Service time never goes back."""
        self.clock_offset: Seconds = 0.0
        """Service time minus steady time: the sum of all clock steps that operators accepted."""
        self.index = index
        """Lists allocations by tenant, state and label; None if this state is never listed."""

        self.geometries: dict[str, Geometry] = {}
        """GPU models by name."""
        self.cluster = Cluster()
        self.scheduler = Scheduler(self.cluster, policy)
        self.nodes: dict[str, NodeStatus] = {}
        self.gpus: Counter[Geometry] = Counter()
        """The number of GPUs of each model, on nodes of any phase."""
        self.layout = 0
        """Grows when a node is added or removed."""
        self._node_version = 0
        """The version that the last changed node got."""
        self.nodes_to_notify: set[str] = set()
        """Managed nodes whose desired state changed. The reader takes the set, notifies agents."""

        self.tenants: dict[str, TenantStatus] = {}
        """Tenants by id."""
        self.tenants_by_name: dict[str, TenantStatus] = {}
        self.tokens: dict[str, TokenIssued] = {}
        """Tokens by id."""
        self.tokens_by_digest: dict[str, TokenIssued] = {}

        self.allocations: dict[str, AllocationRecord] = {}
        """Allocations that have not ended, oldest first."""
        self.leaving: dict[str, AllocationRecord] = {}
        """Ended allocations whose instances may still exist on a managed node."""
        self.instances: dict[str, tuple[int, ...]] = {}
        """The ids of an allocation's instances in the cluster, by allocation."""
        self.owner: dict[int, str] = {}
        """The allocation of an instance, by the instance's id in the cluster."""
        self.phases: Counter[Phase] = Counter()
        """The number of instances on managed nodes in each phase."""

        self.waiting = WaitingRoom(discipline or Discipline())
        self.tickets: dict[str, int] = {}
        """The ticket number of a queued allocation."""
        self.by_ticket: dict[int, str] = {}
        """The queued allocation of a ticket number."""
        self.last_ticket = 0
        self.turn = 0
        """The position of a round-robin policy, as the journal has it."""

        self.placements = AllocationEntries(self)
        self._agents = AgentEntries(self)
        self._apply: dict[type[Entry], Callable[[Any, Row], None]] = {
            ModelEntered: self._model_entered,
            ModelForgotten: self._model_forgotten,
            NodeAdded: self._node_added,
            NodeTurned: self._node_turned,
            NodeRemoved: self._node_removed,
            TenantSet: self._tenant_set,
            TenantRemoved: self._tenant_removed,
            TokenIssued: self._token_issued,
            TokenExpiring: self._token_expiring,
            TokenRevoked: self._token_revoked,
            Rejected: lambda entry, row: None,
            ClockSet: self._clock_set,
            **self.placements.handlers,
            **self._agents.handlers,
        }

    def apply(self, row: Row, in_place: tuple[Instance, ...] | None = None) -> None:
        """Apply the next row.

        ``in_place`` are the row's instances if the scheduler has placed them in this state already.
        """
        if row.seq != self.seq + 1:
            raise SlicewiseError(f"the journal jumps from entry {self.seq} to {row.seq}")
        self.placements.in_place = in_place
        self.at = row.at
        self._apply[type(row.entry)](row.entry, row)
        self.seq = row.seq

    # Models and nodes

    def _model_entered(self, entry: ModelEntered, row: Row) -> None:
        geometry = geometry_of(entry.geometry)
        self.geometries[geometry.model] = geometry
        self.cluster.know(geometry)

    def _model_forgotten(self, entry: ModelForgotten, row: Row) -> None:
        geometry = self.geometries.pop(entry.model)
        self.cluster.forget(geometry)
        del self.gpus[geometry]
        drop_tables()

    def _node_added(self, entry: NodeAdded, row: Row) -> None:
        node = self.cluster.add_node(entry.node, self.geometries[entry.model], entry.gpus)
        if node.gpus.start != entry.first:
            raise SlicewiseError(
                f"the GPUs of node {entry.node!r} begin at {node.gpus.start}, "
                f"and the journal says {entry.first}"
            )
        self.gpus[node.geometry] += entry.gpus
        self.nodes[entry.node] = NodeStatus(
            entry.node, node.geometry, node.gpus, NodePhase.READY, entry.labels
        )
        self.layout += 1
        self.mark_changed(entry.node)

    def _node_turned(self, entry: NodeTurned, row: Row) -> None:
        self.nodes[entry.node].phase = entry.phase
        self.mark_changed(entry.node)
        if entry.phase is NodePhase.READY:
            self.cluster.resume(entry.node)
        else:
            self.cluster.drain(entry.node)

    def _node_removed(self, entry: NodeRemoved, row: Row) -> None:
        node = self.nodes[entry.node]
        self._agents.unblock_all(node)
        self.cluster.remove_node(entry.node)
        del self.nodes[entry.node]
        self.layout += 1
        self.gpus[node.geometry] -= len(node.gpus)

    def mark_changed(self, node: str) -> None:
        """Give a node a new version, because a detail that views show has changed."""
        self._node_version += 1
        self.nodes[node].version = self._node_version

    def desired_changed(self, node: NodeStatus) -> None:
        """Note that the entry being applied changes the desired state of a managed node."""
        node.desired = self.seq + 1
        self.nodes_to_notify.add(node.name)
        self.mark_changed(node.name)

    # Tenants and tokens

    def _tenant_set(self, entry: TenantSet, row: Row) -> None:
        ref = entry.tenant
        tenant = self.tenants.get(ref.id)
        if tenant is not None:
            tenant.quota = entry.quota
        elif ref.name in self.tenants_by_name:
            raise SlicewiseError(f"two tenants are named {ref.name!r}")
        else:
            self.tenants[ref.id] = self.tenants_by_name[ref.name] = TenantStatus(ref, entry.quota)

    def _tenant_removed(self, entry: TenantRemoved, row: Row) -> None:
        for token in [t for t in self.tokens.values() if t.tenant == entry.tenant]:
            self._remove_token(token)
        del self.tenants[entry.tenant.id], self.tenants_by_name[entry.tenant.name]

    def _token_issued(self, entry: TokenIssued, row: Row) -> None:
        self.tokens[entry.token] = self.tokens_by_digest[entry.digest] = entry

    def _token_expiring(self, entry: TokenExpiring, row: Row) -> None:
        token = msgspec.structs.replace(self.tokens[entry.token], expires=entry.expires)
        self.tokens[token.token] = self.tokens_by_digest[token.digest] = token
        self._end_poll(token)

    def _token_revoked(self, entry: TokenRevoked, row: Row) -> None:
        self._remove_token(self.tokens[entry.token])

    def _remove_token(self, token: TokenIssued) -> None:
        self._end_poll(token)
        del self.tokens[token.token]
        del self.tokens_by_digest[token.digest]

    def _end_poll(self, token: TokenIssued) -> None:
        """Notify an agent whose open poll must end earlier, because its token does."""
        if token.node in self.nodes:
            self.nodes_to_notify.add(token.node)

    # Time

    def _clock_set(self, entry: ClockSet, row: Row) -> None:
        self.at += entry.by
        self.clock_offset += entry.by

    @property
    def next_lease(self) -> Seconds | None:
        """The time at which the next lease ends."""
        return self.placements.leases.next_end

    def leases_over(self, now: Seconds) -> Iterator[AllocationRecord]:
        """Yield the allocations whose lease is over; the caller ends each before the next."""
        leases = self.placements.leases
        while (ends := leases.next_end) is not None and ends <= now:
            yield self.allocations[leases.pop()]

    # Allocations

    def record(self, identity: str) -> AllocationRecord:
        """Return an allocation that has not ended, or is leaving."""
        return self.allocations.get(identity) or self.leaving[identity]

    def ended(self, record: AllocationRecord) -> AllocationRecord:
        """Return an ended allocation with the current phases of its instances."""
        return self.leaving.get(record.id) or as_gone(record)

    def on_node(self, node: NodeStatus) -> Iterator[tuple[str, int]]:
        """Yield the instances on a node, as the allocation's id and the index in it."""
        for gpu in node.gpus:
            for instance in self.cluster.instances_on(gpu):
                identity = self.owner.get(instance.id)
                if identity is not None:
                    yield identity, self.instances[identity].index(instance.id)

    def parts(self, instances: Sequence[Instance]) -> tuple[Part, ...]:
        """Return the records of instances that the scheduler has placed."""
        parts = []
        for instance in instances:
            node = self.cluster.node_of(instance.gpu)
            geometry = node.geometry
            profile = geometry.profile(instance.profile)
            index = instance.gpu - node.gpus.start
            part = Part(
                node=node.name,
                gpu=index,
                model=geometry.model,
                profile=profile.name,
                start=instance.start,
                size=profile.size,
                compute=profile.compute,
                memory_gb=profile.memory_gb,
            )
            agent = self.nodes[node.name].agent
            if agent is not None:
                part = msgspec.structs.replace(part, phase=Phase.PLACED, gpu_uuid=agent.gpus[index])
            parts.append(part)
        return tuple(parts)

    def canonical(self, request: Request) -> Request:
        """Return the equivalent request that all requests of the same kind share.

        A need for 15 GB and one for 15.1 GB are equivalent if the next larger profile has 20 GB.
        A policy ranks all GPU states for each kind of request, which is slow, so the number of
        kinds must not grow with the numbers that tenants ask for.
        """
        need = request.want
        if isinstance(need, str):
            return request
        profiles = [p for geometry in self.geometries.values() for p in geometry.plain_profiles]
        compute = min((p.compute for p in profiles if p.compute >= need.compute), default=None)
        memory = min((p.memory_gb for p in profiles if p.memory_gb >= need.memory_gb), default=None)
        if compute is None or memory is None:
            return request
        return Request(Need(compute, memory), request.models)
