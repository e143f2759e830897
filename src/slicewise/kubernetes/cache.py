"""The cluster cache: the objects of the Kubernetes API as a cluster of the engine.

Pools of devices become nodes with GPUs, allocated claims become instances on them, namespaces
become tenants. Every change is a row of a journal, which the read API and the dashboard follow. The
cache holds nothing that cannot be rebuilt from the objects of the API.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from slicewise.control.state import State, TenantStatus
from slicewise.core.cluster import Instance
from slicewise.core.errors import PlacementError
from slicewise.core.geometry import Placement
from slicewise.core.request import Request
from slicewise.engine.offers import Offers
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    AnyEntry,
    Cause,
    Ended,
    Queued,
    QuotaRecord,
    Role,
    Row,
    Seconds,
    Served,
    TenantRef,
    TenantRemoved,
    TenantSet,
    TokenIssued,
    Want,
)
from slicewise.kubernetes.allocations import DeviceId, devices_of, held_back, user_label
from slicewise.kubernetes.api import ResourceClaim
from slicewise.kubernetes.api.common import parse_time
from slicewise.kubernetes.claim_states import ClaimRecord, ClaimRecords, ClaimState
from slicewise.kubernetes.cool_down import CoolDown
from slicewise.kubernetes.cooling_notes import CoolingNote
from slicewise.kubernetes.devices.pool_reading import PoolReading
from slicewise.kubernetes.devices.pools import PoolKey, Pools
from slicewise.kubernetes.journal import ControllerJournal

_ACTOR = "kubernetes"


@dataclass(slots=True)
class _Placed:
    """A claim with devices on known GPUs."""

    claim: str
    devices: tuple[DeviceId, ...]
    gpus: tuple[int, ...]
    pods: set[str] = field(default_factory=set)
    """The uids of the pods that may use the devices."""


@dataclass(slots=True)
class _Clash:
    """An allocation that does not fit the others; its GPUs take nothing new meanwhile."""

    claim: ResourceClaim
    gpus: tuple[int, ...]
    against: frozenset[str]
    """The claims that it conflicts with."""
    why: str


class ClusterCache:
    """Pools, claims and namespaces in one state, with offers in the policy's order."""

    def __init__(
        self,
        policy: str,
        clock: Callable[[], Seconds],
        address: Callable[[], str],
        cool_down: CoolDown | None = None,
    ) -> None:
        self.state = State(policy)
        # Sequence numbers start at the current time: after a restart, readers notice that they
        # have to start over.
        self.state.seq = int(clock() * 1_000_000)
        self.offers = Offers(self.state.scheduler)
        self.journal = ControllerJournal(self.state, address)
        self.clashes: dict[str, _Clash] = {}
        """By uid: allocations that conflict with others."""
        self._clock = clock
        self.cool_down = CoolDown(0.0, clock) if cool_down is None else cool_down
        self.pools = Pools(self.state, self.enter, self._clear)
        self._claims: dict[str, _Placed] = {}
        self.records = ClaimRecords()
        """The record of every known claim, also of claims with devices on unknown GPUs."""
        self._released = 0
        self._cooled: list[str] = []
        """The claims that have cooled down since they were taken last."""
        self._gone: set[str] = set()
        """Deleted namespaces that still have allocations."""
        self.ends_of: Callable[[ResourceClaim], Seconds] = lambda claim: math.inf
        """When the devices of a claim become free, as far as is known or expected."""
        self.on_freed: Callable[[int], None] = lambda gpu: None
        """Called with each GPU on which an instance has ended."""
        self.on_removal: Callable[[set[int]], None] = lambda gpus: None
        """Called with GPUs that are about to be removed."""

    def now(self) -> Seconds:
        """The Unix time."""
        return self._clock()

    @property
    def freed(self) -> int:
        """A number that grows whenever devices are freed."""
        return self._released + self.pools.freed

    def enter(self, entry: AnyEntry, in_place: tuple[Instance, ...] | None = None) -> None:
        """Apply an entry and record it in the journal."""
        row = Row(self.state.seq + 1, self._clock(), _ACTOR, entry)
        self.state.apply(row, in_place)
        self.journal.record(row)

    def add_viewer_token(self, digest: str) -> None:
        """Add a read-only token by its digest."""
        self.enter(TokenIssued("look", digest, Role.READ_ONLY, note="from the token file"))

    # Namespaces

    def set_tenant(self, namespace: TenantRef, quota: QuotaRecord) -> None:
        """Add a namespace as a tenant, or change its quota.

        A namespace created again is another tenant, unless claims of the former one are still
        cached: the API server deletes them before the namespace, but watches may lag.
        """
        self._gone.discard(namespace.name)
        known = self.state.tenants_by_name.get(namespace.name)
        if known is not None and known.ref != namespace and not known.allocations:
            self.enter(TenantRemoved(known.ref))
            known = None
        if known is None or known.quota != quota:
            self.enter(TenantSet(namespace if known is None else known.ref, quota))
            self._released += 1

    def drop_tenant(self, name: str) -> None:
        """Remove a deleted namespace; it stays a tenant until its last allocation ends."""
        known = self.state.tenants_by_name.get(name)
        if known is not None and known.allocations:
            self._gone.add(name)
        elif known is not None:
            self._gone.discard(name)
            self.enter(TenantRemoved(known.ref))

    def tenant(self, name: str) -> TenantStatus:
        """The tenant of a namespace; one whose object was not seen yet is added without a quota."""
        if name not in self.state.tenants_by_name:
            self.enter(TenantSet(TenantRef(f"namespace:{name}", name)))
        return self.state.tenants_by_name[name]

    # Pools

    def set_pool(self, key: PoolKey, reading: PoolReading, home: str) -> None:
        """Add or update a published pool."""
        if self.pools.publish(key, reading, home):
            self._place_unplaced()
        self.cool_down.driver_changed(home, key[0], True)

    def withdraw_pool(self, key: PoolKey) -> None:
        """Withdraw a pool that is not published, or not completely."""
        home = self.pools.home(key)
        self.pools.withdraw(key)
        if home:
            self.cool_down.driver_changed(home, key[0], False)

    def _clear(self, gpus: set[int]) -> None:
        """Remove all claims from GPUs that are about to be removed."""
        for uid, clash in list(self.clashes.items()):
            if not gpus.isdisjoint(clash.gpus):
                self._unclash(uid)
        for uid, entered in list(self._claims.items()):
            if not gpus.isdisjoint(entered.gpus):
                self._leave(uid)
        self.on_removal(gpus)

    # Claims

    def update(self, claim: ResourceClaim) -> ClaimRecord:
        """Apply a version of a claim."""
        record = self.records.update(claim)
        uid = claim.metadata.uid
        if record.allocated:
            self._place(claim)
            if uid in self._claims:
                entered = self._claims[uid]
                reserved = () if held_back(claim) else claim.status.reserved_for
                entered.pods = self.cool_down.users(entered.pods, (one.uid for one in reserved))
        elif record.state is not ClaimState.WRITING:  # writing the finalizer changes the claim too
            self.release(uid, claim.metadata.resource_version)
            if uid in self.cool_down and record.state is ClaimState.PENDING:
                self.records.move(record, ClaimState.COOLING)
        return record

    def _place(self, claim: ResourceClaim) -> None:
        """Place the devices of an allocation, of any controller."""
        uid = claim.metadata.uid
        devices = devices_of(claim)
        entered = self._claims.get(uid)
        self.cool_down.forget(uid)  # whatever was there before is not there any more
        if entered is not None and entered.devices == devices:
            return
        if entered is not None:
            self._leave(uid)
            self._released += 1
        self._unclash(uid)
        self._place_devices(claim, devices)
        if entered is not None:
            self._try_clashes()

    def forget(self, uid: str) -> None:
        """Remove a deleted claim."""
        self.records.drop(uid)
        self.release(uid)

    def release(self, uid: str, version: str = "") -> None:
        """Free the devices of a claim, unless they have to cool down first."""
        self._unclash(uid)
        entered = self._claims.get(uid)
        if entered is None or uid in self.cool_down:
            return
        home = self.pools.gpu(entered.gpus[0]).node_name
        if not self.cool_down.start(uid, home, entered.pods, version):
            self._free(uid)

    def _free(self, uid: str) -> None:
        self._leave(uid)
        self._released += 1
        self._try_clashes()
        self.pools.sweep()

    def take_cooled(self) -> list[str]:
        """Free the slices whose cool-down is over; returns the claims that may be allocated."""
        for uid in self.cool_down.over():
            self._free(uid)
        cooled, self._cooled = self._cooled, []
        return cooled

    def cooling(self) -> list[CoolingNote]:
        """What cools down, for the next leader."""
        late = self._clock() - self.cool_down.now()
        notes = []
        for uid in self.cool_down:
            claim, until_latest = self._claims[uid], self.cool_down.times(uid)
            namespace, _, name = claim.claim.partition("/")
            until, latest = (round(time + late, 3) for time in until_latest)
            notes.append(CoolingNote(namespace, name, uid, claim.devices, until, latest))
        return notes

    def resume_cooling(self, note: CoolingNote) -> None:
        """Let slices cool down as a former leader has noted, unless more is known by now."""
        record = self.records.get(note.uid)
        if note.uid in self._claims or (record is not None and record.allocated):
            return
        found = [
            self.pools.find((driver, pool), device)
            for driver, pool, device in note.devices
            if self.pools.knows(driver, pool)
        ]
        cluster = self.state.cluster
        for gpu, place in filter(None, found):
            placement = cluster.state(gpu).geometry.placement(*place)
            if placement is None or not cluster.is_open(gpu, placement.number):
                return  # given out since
        if note.namespace not in self.state.tenants_by_name:
            self._gone.add(note.namespace)
        self._place_devices(note.claim, note.devices)
        placed = self._claims.get(note.uid)
        if placed is None:
            return
        late = self._clock() - self.cool_down.now()
        home = self.pools.gpu(placed.gpus[0]).node_name
        self.cool_down.resume(note.uid, home, note.until - late, note.latest - late)
        if record is not None and record.state is ClaimState.PENDING:
            self.records.move(record, ClaimState.COOLING)

    def assume(
        self, claim: ResourceClaim, instances: tuple[Instance, ...], labels: dict[str, str]
    ) -> tuple[DeviceId, ...]:
        """Count chosen instances as allocated before the write; returns their devices."""
        self.records.move(self.records.add(claim), ClaimState.WRITING)
        devices = []
        for instance in instances:
            gpu = self.pools.gpu(instance.gpu)
            devices.append(
                DeviceId(gpu.driver, gpu.pool, gpu.devices[instance.profile, instance.start])
            )
        self._record(claim, tuple(devices), instances, labels)
        return tuple(devices)

    def excluded(self, uid: str) -> bool:
        """Whether an allocation conflicts with another one."""
        return uid in self.clashes or any(uid in clash.against for clash in self.clashes.values())

    def _place_devices(self, claim: ResourceClaim, devices: tuple[DeviceId, ...]) -> None:
        """Place the devices of an allocation that are on known GPUs."""
        cluster = self.state.cluster
        placed: list[Instance] = []
        blocked: list[int] = []
        against: set[str] = set()
        why = ""
        for device in devices:
            key = device.driver, device.pool
            if not self.pools.knows(*key):
                continue
            found = self.pools.find(key, device.device)
            if found is None:
                touched = self.pools.touched(key, device.device)
                if touched:
                    why = f"device {device.device} is not of a shape that is understood"
                    blocked += touched
                continue
            gpu, place = found
            placement = cluster.state(gpu).geometry.placement(*place)
            assert placement is not None  # the geometry was read from these devices
            if not cluster.is_open(gpu, placement.number):
                for uid in self._in_the_way(gpu, placement):
                    if uid in self.cool_down:  # other allocators know of no cool-down
                        self._leave(uid)
                        self._released += 1
            try:
                placed.append(cluster.put(gpu, placement.number, self.ends_of(claim)))
            except PlacementError as error:
                blocked.append(gpu)
                against |= self._in_the_way(gpu, placement)
                why = str(error)
        if blocked:
            for instance in reversed(placed):
                cluster.undo_place(instance)
            gpus = tuple(dict.fromkeys([*blocked, *(one.gpu for one in placed)]))
            self.clashes[claim.metadata.uid] = _Clash(claim, gpus, frozenset(against), why)
            for gpu in gpus:
                self.pools.hold(gpu, claim.metadata.uid, True)
        elif placed:
            self._record(claim, devices, tuple(placed), user_label(claim))

    def _in_the_way(self, gpu: int, placement: Placement) -> set[str]:
        """The claims that leave no room for a placement: by their slices, or by shared budgets."""
        there = self.state.cluster.instances_on(gpu)
        geometry = self.state.cluster.state(gpu).geometry
        over = [
            one
            for one in there
            if geometry.profile(one.profile).window(one.start) & placement.window
        ]
        owners = (self.state.owner.get(one.id) for one in over or there)
        return {owner for owner in owners if owner is not None}

    def _record(
        self,
        claim: ResourceClaim,
        devices: tuple[DeviceId, ...],
        instances: tuple[Instance, ...],
        labels: dict[str, str],
    ) -> None:
        uid = claim.metadata.uid
        parts = self.state.parts(instances)
        tenant = self.tenant(claim.metadata.namespace).ref
        if uid in self.state.tickets:
            self.enter(Served(uid, tenant, parts), instances)
        else:
            ends, placed = self.state.cluster.end_of(instances[0]), self._clock()
            record = AllocationRecord(
                id=uid,
                tenant=tenant,
                want=Want(profile=parts[0].profile),
                count=len(parts),
                labels={"claim": claim.metadata.name, **labels},
                requested=parse_time(claim.metadata.creation_timestamp, self._clock()),
                expected_seconds=ends - placed if placed < ends < math.inf else None,
                placed=placed,
                parts=parts,
            )
            self.enter(Allocated(record), instances)
        gpus = tuple(instance.gpu for instance in instances)
        self._claims[uid] = _Placed(claim.metadata.key, devices, gpus)

    def _leave(self, uid: str) -> None:
        if uid in self.cool_down:
            self.cool_down.forget(uid)
            record = self.records.get(uid)
            if record is not None and record.state is ClaimState.COOLING:
                self.records.move(record, ClaimState.PENDING)
                self._cooled.append(record.claim.metadata.key)
        gone = self._claims.pop(uid)
        self._end(uid)
        for gpu in gone.gpus:
            self.on_freed(gpu)

    def _end(self, uid: str) -> None:
        """End an allocation or a wait; with the last one, a deleted namespace is removed."""
        record = self.state.allocations[uid]
        ended = msgspec.structs.replace(record, ended=self._clock(), cause=Cause.RELEASED)
        self.enter(Ended(ended))
        if record.tenant.name in self._gone:
            self.drop_tenant(record.tenant.name)

    def _unclash(self, uid: str) -> None:
        clash = self.clashes.pop(uid, None)
        if clash is not None:
            for gpu in clash.gpus:
                self.pools.hold(gpu, uid, False)

    def _try_clashes(self) -> None:
        for uid, clash in list(self.clashes.items()):
            self._unclash(uid)
            self._place_devices(clash.claim, devices_of(clash.claim))

    def _place_unplaced(self) -> None:
        """Place the allocations with devices on GPUs that have become known."""
        for record in self.records.all():
            if not record.allocated:
                continue
            claim, uid = record.claim, record.claim.metadata.uid
            entered = self._claims.get(uid)
            if entered is not None and len(entered.gpus) < len(entered.devices):
                self._leave(uid)  # only some of its devices were known
            if uid not in self._claims and uid not in self.clashes:
                self._place_devices(claim, devices_of(claim))
        self._try_clashes()

    # Pending claims

    def wait(
        self,
        claim: ResourceClaim,
        wants: Sequence[Request],
        priority: int,
        labels: dict[str, str],
        reason: str,
        detail: str,
        expected: Seconds | None = None,
    ) -> None:
        """Show a claim as waiting on the dashboard; scheduling does not depend on it."""
        if claim.metadata.uid in self.state.allocations:
            return
        first = wants[0]
        want = (
            Want(profile=first.want, models=first.models)
            if isinstance(first.want, str)
            else Want(
                compute=first.want.compute, memory_gb=first.want.memory_gb, models=first.models
            )
        )
        record = AllocationRecord(
            id=claim.metadata.uid,
            tenant=self.tenant(claim.metadata.namespace).ref,
            want=want,
            count=len(wants),
            priority=priority,
            labels={"claim": claim.metadata.name, **labels},
            expected_seconds=expected,
            requested=parse_time(claim.metadata.creation_timestamp, self._clock()),
            reason=reason,
            detail=detail,
        )
        self.enter(Queued(record, self.state.last_ticket + 1))

    def stop_waiting(self, uid: str) -> None:
        """Stop showing a claim as waiting."""
        if uid in self.state.tickets:
            self._end(uid)
