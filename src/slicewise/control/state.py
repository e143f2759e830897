"""The service's state, which is what its journal says, and changes by entries alone.

The writer keeps one to decide on; every process keeps another that follows what is committed and
answers reads. Both are this class, fed with the same rows.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from slicewise.control.allocation_index import AllocationIndex
from slicewise.control.entries import (
    Allocated,
    AllocationRecord,
    ClockSet,
    Ended,
    Entry,
    ModelEntered,
    ModelForgotten,
    Moved,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
    Overtaken,
    Part,
    Queued,
    Rejected,
    Row,
    Seconds,
    Served,
    TenantRemoved,
    TenantSet,
    TokenExpiring,
    TokenIssued,
    TokenRevoked,
    TurnTaken,
)
from slicewise.control.geometries import geometry_of
from slicewise.control.hardware import Phase
from slicewise.control.managed import NOWHERE, Managed, as_gone, leaving
from slicewise.control.standings import NodeStanding as NodeStanding
from slicewise.control.standings import TenantStanding as TenantStanding
from slicewise.control.standings import request_of as request_of
from slicewise.core.cluster import Cluster, Instance
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Need, Request
from slicewise.core.tables import drop_tables
from slicewise.engine.queue import Discipline, Ticket, WaitingRoom
from slicewise.engine.scheduler import Scheduler


class State:
    """Nodes, tenants, tokens, allocations and the queue, as the journal leaves them."""

    def __init__(
        self,
        policy: str = "default",
        discipline: Discipline | None = None,
        index: AllocationIndex | None = None,
    ) -> None:
        self.seq = 0
        """The last entry applied."""
        self.at: Seconds = 0.0
        """Service time at that entry; the next one is not earlier."""
        self.accepted: Seconds = 0.0
        """How far operators have moved service time ahead of steady time, all steps together."""
        self.index = index
        """Of its allocations, where they are to be listed."""
        self.layout = 0
        """How often nodes have joined or left."""
        self._changes = 0
        """How often a node has changed: their versions count on."""
        self.geometries: dict[str, Geometry] = {}
        self.cluster = Cluster()
        self.scheduler = Scheduler(self.cluster, policy)
        self.nodes: dict[str, NodeStanding] = {}
        self.gpus: Counter[Geometry] = Counter()
        """By model: how many GPUs its nodes have, whatever their phase."""
        self.tenants: dict[str, TenantStanding] = {}
        self.tokens: dict[str, TokenIssued] = {}
        self.tokens_by_digest: dict[str, TokenIssued] = {}
        self.allocations: dict[str, AllocationRecord] = {}
        """The living ones: waiting or placed, the oldest first."""
        self.leaving: dict[str, AllocationRecord] = {}
        """Those that have ended, while an agent has not said that their instances are gone."""
        self.instances: dict[str, tuple[int, ...]] = {}
        """By allocation, placed or leaving: its instances in the cluster."""
        self.owner: dict[int, str] = {}
        """By instance: its allocation."""
        self.waiting = WaitingRoom(discipline or Discipline())
        self.tickets: dict[str, int] = {}
        """By waiting allocation: its number in the queue."""
        self.waits_for: dict[int, str] = {}
        """By number in the queue: the allocation."""
        self.last_ticket = 0
        self.turn = 0
        """Where a policy that goes round goes on, as far as the journal says."""
        self.stirred: set[str] = set()
        """Managed nodes on which something else should be by now; whoever tells them clears it."""
        self.phases: Counter[Phase] = Counter()
        """How many instances of managed nodes are in each phase."""
        self.managed = Managed(self)
        self._leases: list[tuple[Seconds, str]] = []
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
            Allocated: self._allocated,
            Queued: self._queued,
            Served: self._served,
            Rejected: self._rejected,
            Ended: self._ended,
            Moved: self._moved,
            Overtaken: self._overtaken,
            TurnTaken: self._turn_taken,
            ClockSet: self._clock_set,
            **self.managed.handlers,
        }
        self._in_place: tuple[Instance, ...] | None = None

    def apply(self, row: Row, in_place: tuple[Instance, ...] | None = None) -> None:
        """Take in the next row; ``in_place`` are its instances, where they have been placed."""
        if row.seq != self.seq + 1:
            raise SlicewiseError(f"the journal jumps from entry {self.seq} to {row.seq}")
        self._in_place = in_place
        self.at = row.at
        self._apply[type(row.entry)](row.entry, row)
        self.seq = row.seq

    # Nodes and models

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
                f"node {entry.node!r} got the GPUs from {node.gpus.start} on, "
                f"and the journal says {entry.first}"
            )
        self.gpus[node.geometry] += entry.gpus
        self.nodes[entry.node] = NodeStanding(
            entry.node, node.geometry, node.gpus, NodePhase.READY, entry.labels
        )
        self.layout += 1
        self.changed(entry.node)

    def _node_turned(self, entry: NodeTurned, row: Row) -> None:
        self.nodes[entry.node].phase = entry.phase
        self.changed(entry.node)
        if entry.phase is NodePhase.READY:
            self.cluster.resume(entry.node)
        else:
            self.cluster.drain(entry.node)

    def _node_removed(self, entry: NodeRemoved, row: Row) -> None:
        self.managed.clear(self.nodes[entry.node])
        self.cluster.remove_node(entry.node)
        gone = self.nodes.pop(entry.node)
        self.layout += 1
        self.gpus[gone.geometry] -= len(gone.gpus)

    # Tenants and tokens

    def _tenant_set(self, entry: TenantSet, row: Row) -> None:
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            self.tenants[entry.tenant] = TenantStanding(entry.tenant, entry.quota, since=row.seq)
        else:
            tenant.quota = entry.quota

    def _tenant_removed(self, entry: TenantRemoved, row: Row) -> None:
        for token in [t for t in self.tokens.values() if t.tenant == entry.tenant]:
            self._forget(token)
        del self.tenants[entry.tenant]
        self.disown(r for r in self.leaving.values() if r.tenant == entry.tenant)

    def _token_issued(self, entry: TokenIssued, row: Row) -> None:
        self.tokens[entry.token] = self.tokens_by_digest[entry.digest] = entry

    def _token_expiring(self, entry: TokenExpiring, row: Row) -> None:
        token = msgspec.structs.replace(self.tokens[entry.token], expires=entry.expires)
        self.tokens[token.token] = self.tokens_by_digest[token.digest] = token
        self._stir_agent(token)

    def _token_revoked(self, entry: TokenRevoked, row: Row) -> None:
        self._forget(self.tokens[entry.token])

    def _stir_agent(self, token: TokenIssued) -> None:
        """Wake an agent that waits for news: it may wait for less long, or not at all any more."""
        if token.node in self.nodes:
            self.stirred.add(token.node)

    def _forget(self, token: TokenIssued) -> None:
        self._stir_agent(token)
        del self.tokens[token.token]
        del self.tokens_by_digest[token.digest]

    # Allocations

    def _allocated(self, entry: Allocated, row: Row) -> None:
        self._add(entry.allocation)
        self._settle(entry.allocation)

    def _queued(self, entry: Queued, row: Row) -> None:
        self._add(entry.allocation)
        self._wait(entry.allocation, entry.ticket)

    def _served(self, entry: Served, row: Row) -> None:
        allocation = msgspec.structs.replace(
            self.allocations[entry.allocation],
            placed=row.at,
            parts=entry.parts,
            reason="",
            detail="",
        )
        self._keep(allocation)
        number = self.tickets.pop(allocation.id)
        self.tenants[allocation.tenant].waiting -= 1
        del self.waits_for[number]
        if number in self.waiting:  # the writer's was taken out when it was served
            self.waiting.withdraw(number)
        self._settle(allocation)

    def _rejected(self, entry: Rejected, row: Row) -> None:
        """Remembered in the journal only."""

    def _ended(self, entry: Ended, row: Row) -> None:
        identity = entry.allocation.id
        gone = self.allocations.pop(identity)
        if self.index is not None:
            self.index.remove(identity)
        tenant = self.tenants[gone.tenant]
        del tenant.allocations[identity]
        number = self.tickets.pop(identity, None)
        if number is not None:
            tenant.waiting -= 1
            del self.waits_for[number]
            if number in self.waiting:  # the writer's was taken out when it expired
                self.waiting.withdraw(number)
        ids = self.instances.pop(identity, ())
        managed = False
        for part, instance in zip(gone.parts, ids, strict=True):
            self._charge(tenant, part, -1)
            if part.phase is None:
                self._free(part, instance)
            else:
                managed = True
        if managed:
            self._leave(entry.allocation, ids)

    def _leave(self, ended: AllocationRecord, ids: tuple[int, ...]) -> None:
        """Keep the slices of an allocation that has ended until its instances are gone."""
        self._keep(leaving(ended))
        kept = []
        for part, instance in zip(ended.parts, ids, strict=True):
            kept.append(NOWHERE if part.phase is None else instance)
            if part.phase is not None:
                self._turn(part.phase, Phase.RELEASING)
                self.stir(self.nodes[part.node])
        self.instances[ended.id] = tuple(kept)

    def _moved(self, entry: Moved, row: Row) -> None:
        allocation = self.allocations[entry.allocation]
        tenant = self.tenants[allocation.tenant]
        ids = list(self.instances[allocation.id])
        parts = list(allocation.parts)
        old = parts[entry.index]
        part = parts[entry.index] = entry.part
        made = self._place(part)
        self._free(old, ids[entry.index])
        self._charge(tenant, old, -1)
        self._charge(tenant, part, 1)
        self._arrive(part)
        self.owner[made.id] = allocation.id
        ids[entry.index] = made.id
        self.instances[allocation.id] = tuple(ids)
        self._keep(msgspec.structs.replace(allocation, parts=tuple(parts)))

    def _overtaken(self, entry: Overtaken, row: Row) -> None:
        for number, times in entry.tickets.items():
            self.waiting.set_overtaken(number, times)

    def _turn_taken(self, entry: TurnTaken, row: Row) -> None:
        self.turn = self.scheduler.turn = entry.turn

    def _clock_set(self, entry: ClockSet, row: Row) -> None:
        self.at += entry.by
        self.accepted += entry.by

    def _keep(self, record: AllocationRecord) -> None:
        """Keep an allocation as it is from here on: among the living, or those that are leaving."""
        (self.allocations if record.ended is None else self.leaving)[record.id] = record
        if self.index is not None:
            self.index.put(record)

    def _add(self, allocation: AllocationRecord) -> None:
        self._keep(allocation)
        self.tenants[allocation.tenant].allocations[allocation.id] = None

    def _settle(self, allocation: AllocationRecord) -> None:
        """Note where an allocation is; put it there unless it is there already."""
        placed = self._in_place
        if placed is None:
            placed = tuple([self._place(part) for part in allocation.parts])
        self.turn = self.scheduler.turn = placed[-1].gpu + 1
        identity = allocation.id
        self.instances[identity] = tuple([instance.id for instance in placed])
        tenant = self.tenants[allocation.tenant]
        for part, instance in zip(allocation.parts, placed, strict=True):
            self.owner[instance.id] = identity
            self._charge(tenant, part, 1)
            self._arrive(part)
        ends = allocation.ends
        if ends is not None:
            self._note_lease(ends, identity)

    def _place(self, part: Part) -> Instance:
        node = self.nodes[part.node]
        placement = node.geometry.placement(part.profile, part.start)
        if placement is None:
            raise SlicewiseError(
                f"{part.profile} cannot start at slice {part.start} on {node.geometry.model}"
            )
        return self.cluster.put(node.gpus[part.gpu], placement.number)

    def _arrive(self, part: Part) -> None:
        node = self.nodes[part.node]
        node.instances += 1
        self.changed(part.node)
        if part.phase is not None:
            self._turn(None, part.phase)
            self.stir(node)

    def _free(self, part: Part, instance: int) -> None:
        self.cluster.release(instance)
        del self.owner[instance]
        self.nodes[part.node].instances -= 1
        self.changed(part.node)

    def _charge(self, tenant: TenantStanding, part: Part, sign: int) -> None:
        usage = tenant.usage
        usage.memory_slices += sign * part.size
        usage.compute_slices += sign * part.compute
        usage.instances += sign

    def _wait(self, allocation: AllocationRecord, number: int) -> None:
        self.last_ticket = max(self.last_ticket, number)
        self.tickets[allocation.id] = number
        self.waits_for[number] = allocation.id
        self.tenants[allocation.tenant].waiting += 1
        self.waiting.enter(
            Ticket(
                number=number,
                request=request_of(allocation.want),
                count=allocation.count,
                tenant=allocation.tenant,
                priority=allocation.priority,
                entered=allocation.requested,
                deadline=allocation.deadline,
            )
        )

    def parts(self, instances: Sequence[Instance]) -> tuple[Part, ...]:
        """Instances of the cluster, as they are written down when they are placed."""
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

    # Instances of managed nodes

    def record(self, identity: str) -> AllocationRecord:
        """An allocation that has or may have instances: living, or leaving."""
        return self.allocations.get(identity) or self.leaving[identity]

    def on_node(self, node: NodeStanding) -> Iterator[tuple[str, int]]:
        """The instances of allocations on a node: the allocation, and which of its instances."""
        for gpu in node.gpus:
            for instance in self.cluster.instances_on(gpu):
                identity = self.owner.get(instance.id)
                if identity is not None:
                    yield identity, self.instances[identity].index(instance.id)

    def set_part(self, record: AllocationRecord, index: int, part: Part) -> None:
        """Note what became of an instance that stays where it is."""
        self._turn(record.parts[index].phase, part.phase)
        changed = msgspec.structs.replace(
            record, parts=(*record.parts[:index], part, *record.parts[index + 1 :])
        )
        self._keep(changed)
        self.changed(part.node)

    def vacate(self, record: AllocationRecord, index: int, part: Part) -> None:
        """An instance that was leaving is gone: its slices are free."""
        ids = list(self.instances[record.id])
        self._free(part, ids[index])
        ids[index] = NOWHERE
        self.set_part(record, index, part)
        if all(one == NOWHERE for one in ids):
            del self.leaving[record.id], self.instances[record.id]
            if self.index is not None:
                self.index.remove(record.id)
        else:
            self.instances[record.id] = tuple(ids)

    def let_leave(self, record: AllocationRecord) -> None:
        """Take over an allocation that was leaving, from an image."""
        ids = []
        for part in record.parts:
            if part.phase in (None, Phase.GONE):
                ids.append(NOWHERE)
                continue
            made = self._place(part)
            self.owner[made.id] = record.id
            self._arrive(part)
            ids.append(made.id)
        self._keep(record)
        self.instances[record.id] = tuple(ids)

    def disown(self, records: Iterable[AllocationRecord]) -> None:
        """Let what is leaving be nobody's: its tenant is gone, and another may have its name."""
        for record in list(records):
            self._keep(msgspec.structs.replace(record, tenant=""))
            for part in record.parts:
                if part.node in self.nodes:
                    self.changed(part.node)

    def ended(self, record: AllocationRecord) -> AllocationRecord:
        """An allocation that has ended, as it stands by now."""
        return self.leaving.get(record.id) or as_gone(record)

    def _turn(self, old: Phase | None, new: Phase | None) -> None:
        if old is not None:
            self.phases[old] -= 1
        if new is not None and new is not Phase.GONE:
            self.phases[new] += 1

    def stir(self, node: NodeStanding) -> None:
        """Something else should be on a node with the entry that is being applied."""
        node.desired = self.seq + 1
        self.stirred.add(node.name)
        self.changed(node.name)

    def changed(self, node: str) -> None:
        """Something that is shown of a node is another from here on."""
        self._changes += 1
        self.nodes[node].version = self._changes

    def canonical(self, request: Request) -> Request:
        """The same request, in the words of all that mean the same to the models known here.

        A need for 15 GB and one for 15.1 GB are alike where the next profile has 20 GB. Policies
        rank every state for every kind of request, which takes a while, so there must not be as
        many kinds as there are numbers.
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

    # Time

    @property
    def next_lease(self) -> Seconds | None:
        """When the next lease ends."""
        self._drop_stale_leases()
        return self._leases[0][0] if self._leases else None

    def leases_over(self, now: Seconds) -> Iterator[AllocationRecord]:
        """The placed allocations whose lease is over, which the caller ends one by one."""
        while (ends := self.next_lease) is not None and ends <= now:
            yield self.allocations[heapq.heappop(self._leases)[1]]

    def _note_lease(self, ends: Seconds, identity: str) -> None:
        leases = self._leases
        if len(leases) > 2 * len(self.allocations) + 100:  # most ended long before their time
            leases[:] = [lease for lease in leases if lease[1] in self.allocations]
            heapq.heapify(leases)
        heapq.heappush(leases, (ends, identity))

    def _drop_stale_leases(self) -> None:
        while self._leases and self._leases[0][1] not in self.allocations:
            heapq.heappop(self._leases)
