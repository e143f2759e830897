"""The part of the state that entries about allocations change: instances, usage, queue, leases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from slicewise.control.agent_state import NO_INSTANCE, as_leaving
from slicewise.control.lease_times import LeaseTimes, known_end
from slicewise.control.status import TenantStatus, request_of
from slicewise.core.cluster import Instance
from slicewise.core.errors import SlicewiseError
from slicewise.engine.queue import Ticket
from slicewise.engine.reservations import LineKey, Window
from slicewise.engine.shares import FULL_PRICE
from slicewise.journal.agent_entries import Phase
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    Ended,
    Entry,
    Moved,
    Part,
    Queued,
    Reserved,
    Row,
    Seconds,
    Served,
    TurnTaken,
)
from slicewise.journal.lease_entries import LeaseEnding, LeaseExtended
from slicewise.journal.reclaim_entries import HeldBack, Reclaiming

if TYPE_CHECKING:
    from slicewise.control.state import State


class AllocationEntries:
    """Applies the entries about allocations to a state."""

    def __init__(self, state: State, lease_warning: Seconds) -> None:
        self._state = state
        self.in_place: tuple[Instance, ...] | None = None
        """The instances of the entry being applied, if the scheduler has placed them already."""
        self.lease_times = LeaseTimes(state.allocations, lease_warning)
        self.handlers: dict[type[Entry], Callable[[Any, Row], None]] = {
            Allocated: self._allocated,
            Queued: self._queued,
            Served: self._served,
            Ended: self._ended,
            Moved: self._moved,
            Reserved: self._reserved,
            Reclaiming: self._reclaiming,
            HeldBack: self._held_back,
            TurnTaken: self._turn_taken,
            LeaseExtended: self._lease_extended,
            LeaseEnding: self._lease_ending,
        }

    # Entries

    def _allocated(self, entry: Allocated, row: Row) -> None:
        self._state.demand.created(entry.allocation, row.at)
        self._add(entry.allocation)
        self._occupy(entry.allocation)

    def _queued(self, entry: Queued, row: Row) -> None:
        state, record, number = self._state, entry.allocation, entry.ticket
        state.demand.created(record, row.at)
        self._add(record)
        state.last_ticket = max(state.last_ticket, number)
        state.tickets[record.id] = number
        state.by_ticket[number] = record.id
        self._tenant(record).waiting += 1
        if record.reclaimed_on is not None or record.held_until is not None:
            state.held[record.id] = None
        state.waiting.enter(
            Ticket(
                number=number,
                request=state.canonical(request_of(record.want)),
                count=record.count,
                tenant=record.tenant.id,
                priority=record.priority,
                entered=record.requested,
                deadline=record.deadline,
                lease=record.lease,
                expected=record.expected_seconds,
                held_until=record.held_until if record.reclaimed_on is None else math.inf,
            )
        )

    def _served(self, entry: Served, row: Row) -> None:
        record = msgspec.structs.replace(
            self._state.allocations[entry.allocation],
            placed=row.at,
            parts=entry.parts,
            reason="",
            detail="",
        )
        self.store(record)
        self._dequeue(record)
        self._occupy(record)

    def _ended(self, entry: Ended, row: Row) -> None:
        state, identity = self._state, entry.allocation.id
        state.demand.ended(entry.allocation, row.at)
        record = state.allocations.pop(identity)
        if state.index is not None:
            state.index.remove(identity)
        tenant = self._tenant(record)
        del tenant.allocations[identity]
        self._dequeue(record)
        state.notices.pop(identity, None)
        state.preemptible.pop(identity, None)
        ids = state.instances.pop(identity, ())
        managed = False
        for part, instance in zip(record.parts, ids, strict=True):
            self._charge(record, part, -1)
            if part.phase is None:
                self._free(part, instance)
            else:
                managed = True
        if managed:
            self._leave(entry.allocation, ids)

    def _leave(self, ended: AllocationRecord, ids: tuple[int, ...]) -> None:
        """Keep the slices of an ended allocation until its agents report its instances gone."""
        state = self._state
        self.store(as_leaving(ended))
        kept = []
        for part, instance in zip(ended.parts, ids, strict=True):
            kept.append(NO_INSTANCE if part.phase is None else instance)
            if part.phase is not None:
                state.cluster.set_end(instance, known_end(ended))
                self._count_phase(part.phase, Phase.RELEASING)
                state.desired_changed(state.nodes[part.node])
        state.instances[ended.id] = tuple(kept)

    def _moved(self, entry: Moved, row: Row) -> None:
        state = self._state
        record = state.allocations[entry.allocation]
        ids = list(state.instances[record.id])
        parts = list(record.parts)
        old, new = parts[entry.index], entry.part
        made = self._place(new, known_end(record))
        self._free(old, ids[entry.index])
        self._charge(record, old, -1)
        self._charge(record, new, 1)
        self._count_instance(new)
        state.owner[made.id] = record.id
        ids[entry.index], parts[entry.index] = made.id, new
        state.instances[record.id] = tuple(ids)
        self.store(msgspec.structs.replace(record, parts=tuple(parts)))

    def _reserved(self, entry: Reserved, row: Row) -> None:
        state = self._state
        windows = []
        for record in entry.windows:
            node = state.nodes[record.node]
            placement = node.geometry.placement(record.profile, record.start)
            if placement is None:
                raise SlicewiseError(
                    f"{record.profile} cannot start at slice {record.start} on "
                    f"{node.geometry.model}"
                )
            gpu = node.gpus[record.gpu]
            windows.append(Window(gpu, placement.number, record.opens, record.claimed))
        request = state.canonical(request_of(entry.want))
        line = LineKey(entry.tenant.id, request, entry.count)
        before = state.reservations.of(line)
        state.reservations.set(line, windows)
        for window in {*before, *windows}:
            state.mark_changed(state.cluster.node_of(window.gpu).name)

    def _reclaiming(self, entry: Reclaiming, row: Row) -> None:
        state = self._state
        record = state.allocations[entry.allocation]
        record = msgspec.structs.replace(record, reclaimed_at=entry.at, reclaimed_on=entry.on)
        self.store(record)
        self._set_ends(record)
        if entry.at is None:
            del state.notices[record.id]
        else:
            state.notices[record.id] = None
        for part in record.parts:
            if part.phase is not None:
                state.desired_changed(state.nodes[part.node])

    def _held_back(self, entry: HeldBack, row: Row) -> None:
        state = self._state
        record = state.allocations[entry.allocation]
        self.store(msgspec.structs.replace(record, reclaimed_on=None, held_until=entry.until))
        if entry.until is None:
            del state.held[record.id]
        state.waiting.hold(state.tickets[record.id], entry.until)

    def _turn_taken(self, entry: TurnTaken, row: Row) -> None:
        self._state.turn = self._state.scheduler.turn = entry.turn

    def _lease_extended(self, entry: LeaseExtended, row: Row) -> None:
        record = self._state.allocations[entry.allocation]
        self._lease(
            msgspec.structs.replace(record, lease=entry.lease, extended=row.at, warned=False)
        )

    def _lease_ending(self, entry: LeaseEnding, row: Row) -> None:
        record = self._state.allocations[entry.allocation]
        self._lease(msgspec.structs.replace(record, warned=True))

    def _lease(self, record: AllocationRecord) -> None:
        """Store an allocation, the next time of its lease and its end."""
        self.store(record)
        self._set_ends(record)
        self.lease_times.add(record)

    def _set_ends(self, record: AllocationRecord) -> None:
        """Set when the instances of an allocation end, as far as is known."""
        for instance in self._state.instances[record.id]:
            self._state.cluster.set_end(instance, known_end(record))

    # Records

    def store(self, record: AllocationRecord) -> None:
        """Store the new version of an allocation, and index it."""
        state = self._state
        (state.allocations if record.ended is None else state.leaving)[record.id] = record
        if state.index is not None:
            state.index.put(record)

    def _add(self, record: AllocationRecord) -> None:
        self.store(record)
        self._tenant(record).allocations[record.id] = None

    def _tenant(self, record: AllocationRecord) -> TenantStatus:
        return self._state.tenants[record.tenant.id]

    def _dequeue(self, record: AllocationRecord) -> None:
        state = self._state
        number = state.tickets.pop(record.id, None)
        if number is None:
            return
        self._tenant(record).waiting -= 1
        del state.by_ticket[number]
        state.held.pop(record.id, None)
        state.waiting.withdraw(number)

    # Instances

    def _occupy(self, record: AllocationRecord) -> None:
        """Place the instances of an allocation unless the scheduler has, and charge them."""
        state, placed = self._state, self.in_place
        ends = known_end(record)
        if placed is None:
            placed = tuple([self._place(part, ends) for part in record.parts])
        else:  # not every way to place one tells its end
            for instance in placed:
                if state.cluster.end_of(instance) != ends:
                    state.cluster.set_end(instance, ends)
        state.turn = state.scheduler.turn = placed[-1].gpu + 1
        identity = record.id
        state.instances[identity] = tuple([instance.id for instance in placed])
        if record.preemptible:
            state.preemptible[identity] = None
        if record.reclaimed_at is not None:
            state.notices[identity] = None
        for part, instance in zip(record.parts, placed, strict=True):
            state.owner[instance.id] = identity
            self._charge(record, part, 1)
            self._count_instance(part)
            state.waiting.placed(state.nodes[part.node].geometry, record.requested)
        self.lease_times.add(record)

    def _place(self, part: Part, ends: Seconds) -> Instance:
        node = self._state.nodes[part.node]
        placement = node.geometry.placement(part.profile, part.start)
        if placement is None:
            raise SlicewiseError(
                f"{part.profile} cannot start at slice {part.start} on {node.geometry.model}"
            )
        return self._state.cluster.put(node.gpus[part.gpu], placement.number, ends)

    def _count_instance(self, part: Part) -> None:
        node = self._state.nodes[part.node]
        node.instances += 1
        self._state.mark_changed(part.node)
        if part.phase is not None:
            self._count_phase(None, part.phase)
            self._state.desired_changed(node)

    def _free(self, part: Part, instance: int) -> None:
        state = self._state
        state.cluster.release(instance)
        del state.owner[instance]
        state.nodes[part.node].instances -= 1
        state.mark_changed(part.node)

    def _charge(self, record: AllocationRecord, part: Part, sign: int) -> None:
        state, usage = self._state, self._tenant(record).usage
        usage.memory_slices += sign * part.size
        usage.compute_slices += sign * part.compute
        usage.instances += sign
        state.shares.charge(
            record.tenant.id,
            state.geometries[part.model],
            sign * part.size,
            sign * part.compute,
            state.preemptible_price if record.preemptible else FULL_PRICE,
        )

    def _count_phase(self, old: Phase | None, new: Phase | None) -> None:
        phases = self._state.phases
        if old is not None:
            phases[old] -= 1
        if new is not None and new is not Phase.GONE:
            phases[new] += 1

    def set_part(self, record: AllocationRecord, index: int, part: Part) -> None:
        """Replace the record of an instance that stays in its place."""
        self._count_phase(record.parts[index].phase, part.phase)
        parts = (*record.parts[:index], part, *record.parts[index + 1 :])
        self.store(msgspec.structs.replace(record, parts=parts))
        self._state.mark_changed(part.node)

    def vacate(self, record: AllocationRecord, index: int, part: Part) -> None:
        """Free the slices of a leaving instance that is gone."""
        state = self._state
        ids = list(state.instances[record.id])
        self._free(part, ids[index])
        ids[index] = NO_INSTANCE
        self.set_part(record, index, part)
        if all(one == NO_INSTANCE for one in ids):
            del state.leaving[record.id], state.instances[record.id]
            if state.index is not None:
                state.index.remove(record.id)
        else:
            state.instances[record.id] = tuple(ids)

    def restore_leaving(self, record: AllocationRecord) -> None:
        """Add a leaving allocation from a snapshot; no entry creates one directly."""
        state = self._state
        ids = []
        for part in record.parts:
            if part.phase in (None, Phase.GONE):
                ids.append(NO_INSTANCE)
                continue
            made = self._place(part, known_end(record))
            state.owner[made.id] = record.id
            self._count_instance(part)
            ids.append(made.id)
        self.store(record)
        state.instances[record.id] = tuple(ids)
