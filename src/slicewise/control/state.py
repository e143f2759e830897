"""The state of the service: the result of applying the journal's entries in order.

The commit loop decides on one State. Every process keeps another one, the replica, which follows
the committed rows and answers reads.

Entries about allocations are applied in `allocation_state`, those that agents cause in
`agent_state`; all others here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from slicewise.control.agent_state import AgentEntries, as_gone
from slicewise.control.allocation_index import AllocationIndex
from slicewise.control.allocation_state import AllocationEntries
from slicewise.control.demand_state import DemandState
from slicewise.control.geometries import geometry_of
from slicewise.control.policy_state import PolicyState
from slicewise.control.status import NodeStatus as NodeStatus
from slicewise.control.status import TenantStatus as TenantStatus
from slicewise.control.status import request_of as request_of
from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Need, Request
from slicewise.core.tables import drop_tables
from slicewise.engine.queue import Queue, Ticket
from slicewise.engine.reservations import LineKey, Reservations, Window
from slicewise.engine.scheduler import Scheduler
from slicewise.engine.shares import FULL_PRICE, Entitlement, Shares
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
    Want,
    WindowRecord,
)
from slicewise.journal.policy_entries import PolicyChosen


class State:
    """Nodes, tenants, tokens, allocations and the queue."""

    def __init__(
        self,
        policy: str = "default",
        index: AllocationIndex | None = None,
        lease_warning: Seconds = 0,
        preemptible_price: int = FULL_PRICE,
    ) -> None:
        """``lease_warning``: the time between a warning and the end of a lease; 0 for none."""
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

        self.shares = Shares()
        """What tenants use, by GPU model, and what they are entitled to."""
        self.preemptible_price = preemptible_price
        """What a preemptible slice counts in a tenant's share, in percent."""
        self.waiting = Queue(self.shares)
        """The queued allocations, as tickets."""
        self.reservations = Reservations(self.cluster)
        """The windows that are kept for queued allocations."""
        self.tickets: dict[str, int] = {}
        """The ticket number of a queued allocation."""
        self.by_ticket: dict[int, str] = {}
        """The queued allocation of a ticket number."""
        self.preemptible: dict[str, None] = {}
        """The ids of placed allocations that are preemptible."""
        self.notices: dict[str, None] = {}
        """The ids of placed allocations that have notice."""
        self.held: dict[str, None] = {}
        """The ids of queued allocations that were reclaimed and are held back."""
        self.last_ticket = 0
        self.turn = 0
        """The position of a round-robin policy, as the journal has it."""

        self.demand = DemandState(self)
        self.policy = PolicyState(self)
        self.placements = AllocationEntries(self, lease_warning)
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
            Rejected: lambda entry, row: self.demand.rejected(entry, row.at),
            PolicyChosen: self.policy.chose,
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
        self._rename_requests()

    def _model_forgotten(self, entry: ModelForgotten, row: Row) -> None:
        geometry = self.geometries.pop(entry.model)
        self.cluster.forget(geometry)
        del self.gpus[geometry]
        drop_tables(geometry)
        self.waiting.forget(geometry)
        self._rename_requests()

    def _node_added(self, entry: NodeAdded, row: Row) -> None:
        node = self.cluster.add_node(entry.node, self.geometries[entry.model], entry.gpus)
        if node.gpus.start != entry.first:
            raise SlicewiseError(
                f"the GPUs of node {entry.node!r} begin at {node.gpus.start}, "
                f"and the journal says {entry.first}"
            )
        self.gpus[node.geometry] += entry.gpus
        self.shares.add_gpus(node.geometry, entry.gpus)
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
        for _, pool in self.reservations:  # a line may lose windows on other nodes as well
            for window in pool:
                self.mark_changed(self.cluster.node_of(window.gpu).name)
        self.reservations.drop(node.gpus)
        self.cluster.remove_node(entry.node)
        self.shares.add_gpus(node.geometry, -len(node.gpus))
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
        quota = entry.quota
        self.shares.entitle(ref.id, Entitlement(quota.weight, quota.guarantee, quota.max_priority))

    def _tenant_removed(self, entry: TenantRemoved, row: Row) -> None:
        for token in [t for t in self.tokens.values() if t.tenant == entry.tenant]:
            self._remove_token(token)
        del self.tenants[entry.tenant.id], self.tenants_by_name[entry.tenant.name]
        self.shares.forget(entry.tenant.id)

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
        """The next time at which a lease ends or a warning is due."""
        return self.placements.lease_times.next_time

    def leases_due(self, now: Seconds) -> Iterator[AllocationRecord]:
        """Yield the allocations whose lease is over or ends soon.

        The caller ends each one or enters its warning before the next.
        """
        times = self.placements.lease_times
        while (time := times.next_time) is not None and time <= now:
            yield self.allocations[times.pop()]

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

    def window_records(self, windows: Iterable[Window]) -> tuple[WindowRecord, ...]:
        """Return the records of reserved windows."""
        records = []
        for window in windows:
            node = self.cluster.node_of(window.gpu)
            placement = node.geometry.placements[window.placement]
            records.append(
                WindowRecord(
                    node=node.name,
                    gpu=window.gpu - node.gpus.start,
                    profile=placement.profile.name,
                    start=placement.start,
                    opens=window.opens,
                    claimed=window.claimed,
                )
            )
        return tuple(records)

    def want_of(self, line: LineKey) -> Want:
        """Return what the first request of a line asks for, in its own words."""
        waiting = self.waiting.line(line)
        if waiting is None or waiting.head is None:  # the last one has just left
            want = line.request.want
            if isinstance(want, str):
                return Want(profile=want, models=line.request.models)
            return Want(compute=want.compute, memory_gb=want.memory_gb, models=line.request.models)
        return self.allocations[self.by_ticket[waiting.head]].want

    def _rename_requests(self) -> None:
        """Find the canonical requests of queued allocations again: the models have changed."""
        queue = self.waiting
        if not len(queue):
            return
        held = {
            line: list(islice(waiting.ready, len(pool) // line.instances))
            for line, pool in self.reservations
            if (waiting := queue.line(line)) is not None
        }

        def canonical(ticket: Ticket) -> Request:
            # From what was asked for: what was canonical may be too coarse now.
            return self.canonical(request_of(self.allocations[self.by_ticket[ticket.number]].want))

        queue.rename(canonical)
        self.reservations.rename(
            {line: [queue.ticket(number).line for number in held[line]] for line in held}
        )

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
