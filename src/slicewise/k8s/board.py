"""The board: the cluster as the Kubernetes API says it, in the words of the engine.

Pools of devices become nodes with GPUs, allocated claims become instances on them, namespaces
become tenants. Everything is entered as rows of a journal, so that whoever follows it, the
service's reading half first of all, sees the same. Nothing here is remembered beyond what the API
says: a board that is built anew from the same objects is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from slicewise.control.entries import (
    Allocated,
    AllocationRecord,
    AnyEntry,
    Cause,
    Ended,
    Part,
    Queued,
    QuotaRecord,
    Role,
    Row,
    Seconds,
    Served,
    TenantRemoved,
    TenantSet,
    TokenIssued,
    Want,
)
from slicewise.control.state import State, TenantStanding
from slicewise.core.cluster import Instance
from slicewise.core.errors import PlacementError
from slicewise.core.geometry import Placement
from slicewise.core.request import Request
from slicewise.engine.offers import Offers
from slicewise.k8s.api import ResourceClaim
from slicewise.k8s.devices import PoolReading
from slicewise.k8s.journal import Recent
from slicewise.k8s.pools import PoolKey, Pools
from slicewise.k8s.times import moment

_ACTOR = "kubernetes"


class Seat(NamedTuple):
    """A device that a claim has."""

    driver: str
    pool: str
    device: str


@dataclass(slots=True)
class _Entered:
    """A claim that is on the board."""

    claim: str
    seats: tuple[Seat, ...]
    gpus: tuple[int, ...]


@dataclass(slots=True)
class _Clash:
    """An allocation that cannot be as the board stands: its GPUs take nothing new meanwhile."""

    claim: ResourceClaim
    gpus: tuple[int, ...]
    against: frozenset[str]
    """The claims on the board that it excludes."""
    why: str


class Board:
    """Pools, claims and namespaces in one state, with places in the policy's order."""

    def __init__(self, policy: str, clock: Callable[[], Seconds], address: Callable[[], str]):
        self.state = State(policy)
        # Each process counts from where the clock stands, so that whoever followed another one,
        # or this one before a restart, sees that it has to begin anew.
        self.state.seq = int(clock() * 1_000_000)
        self.offers = Offers(self.state.scheduler)
        self.journal = Recent(self.state, address)
        self.clashes: dict[str, _Clash] = {}
        """By claim: allocations that contradict others."""
        self._clock = clock
        self.pools = Pools(self.state, self.enter, self._clear)
        self._claims: dict[str, _Entered] = {}
        self._allocated: dict[str, ResourceClaim] = {}
        """By uid: all claims with an allocation, also of devices that are not known here."""
        self._released = 0
        self._gone: set[str] = set()
        """Namespaces that are gone, and still tenants."""

    @property
    def freed(self) -> int:
        """Grows whenever room appears."""
        return self._released + self.pools.freed

    def enter(self, entry: AnyEntry, in_place: tuple[Instance, ...] | None = None) -> None:
        """Apply an entry, and let those who follow know."""
        row = Row(self.state.seq + 1, self._clock(), _ACTOR, entry)
        self.state.apply(row, in_place)
        self.journal.record(row)

    def let_look(self, digest: str) -> None:
        """Let whoever has the secret of this digest read everything."""
        self.enter(TokenIssued("look", digest, Role.READ_ONLY, note="from the token file"))

    # Namespaces

    def set_tenant(self, name: str, quota: QuotaRecord) -> None:
        """A namespace is there, with this quota."""
        self._gone.discard(name)
        known = self.state.tenants.get(name)
        if known is None or known.quota != quota:
            self.enter(TenantSet(name, quota))
            self._released += 1

    def drop_tenant(self, name: str) -> None:
        """A namespace is gone; it stays a tenant while claims of it are on the board."""
        known = self.state.tenants.get(name)
        if known is not None and known.allocations:
            self._gone.add(name)
        elif known is not None:
            self._gone.discard(name)
            self.enter(TenantRemoved(name))

    def tenant(self, name: str) -> TenantStanding:
        """A namespace as a tenant; one that is not known yet has no quota."""
        if name not in self.state.tenants:
            self.enter(TenantSet(name))
        return self.state.tenants[name]

    # Pools

    def set_pool(self, key: PoolKey, reading: PoolReading, home: str) -> None:
        """A pool is published like this now."""
        if self.pools.publish(key, reading, home):
            self._settle_again()

    def _clear(self, gpus: set[int]) -> None:
        """Take everything off GPUs that are to go; the API still says what was there."""
        for uid, clash in list(self.clashes.items()):
            if not gpus.isdisjoint(clash.gpus):
                self._unclash(uid)
        for uid, entered in list(self._claims.items()):
            if not gpus.isdisjoint(entered.gpus):
                self._leave(uid)

    # Claims

    def settle(self, claim: ResourceClaim) -> None:
        """Make the board agree with a claim's allocation, whoever made it."""
        uid = claim.metadata.uid
        allocation = claim.status.allocation
        if allocation is None:
            self._allocated.pop(uid, None)
            self.release(uid)
            return
        self._allocated[uid] = claim
        seats = seats_of(claim)
        entered = self._claims.get(uid)
        if entered is not None and entered.seats == seats:
            return
        if entered is not None:
            self._leave(uid)
            self._released += 1
        self._unclash(uid)
        self._enter_claim(claim, seats)
        if entered is not None:
            self._try_clashes()

    def forget(self, uid: str) -> None:
        """A claim is gone."""
        self._allocated.pop(uid, None)
        self.release(uid)

    def release(self, uid: str) -> None:
        """A claim has no devices any more."""
        self._unclash(uid)
        if uid in self._claims:
            self._leave(uid)
            self._released += 1
            self._try_clashes()
            self.pools.sweep()

    def decided(
        self, claim: ResourceClaim, instances: tuple[Instance, ...], labels: dict[str, str]
    ) -> tuple[Seat, ...]:
        """A claim was given instances that are in the cluster already; returns their devices."""
        seats = []
        for instance in instances:
            gpu = self.pools.gpu(instance.gpu)
            seats.append(Seat(gpu.driver, gpu.pool, gpu.devices[instance.profile, instance.start]))
        self._record(claim, tuple(seats), instances, labels)
        return tuple(seats)

    def excluded(self, uid: str) -> bool:
        """Whether an allocation and one of somebody else's cannot both be."""
        return uid in self.clashes or any(uid in clash.against for clash in self.clashes.values())

    def claim(self, uid: str) -> ResourceClaim | None:
        """A claim with an allocation, as it was last heard of."""
        return self._allocated.get(uid)

    def _enter_claim(self, claim: ResourceClaim, seats: tuple[Seat, ...]) -> None:
        """Put an allocation on the board, as far as its devices are known here."""
        cluster = self.state.cluster
        placed: list[Instance] = []
        blocked: list[int] = []
        against: set[str] = set()
        why = ""
        for seat in seats:
            key = seat.driver, seat.pool
            if not self.pools.knows(*key):
                continue
            found = self.pools.find(key, seat.device)
            if found is None:
                touched = self.pools.touched(key, seat.device)
                if touched:
                    why = f"device {seat.device} is not of a shape that is understood"
                    blocked += touched
                continue
            gpu, place = found
            placement = cluster.state(gpu).geometry.placement(*place)
            assert placement is not None  # the geometry was read from these devices
            try:
                placed.append(cluster.put(gpu, placement.number))
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
            self._record(claim, seats, tuple(placed), _user(claim))

    def _in_the_way(self, gpu: int, placement: Placement) -> set[str]:
        """The claims that leave no room for a placement: by its slices, or by what is shared."""
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
        seats: tuple[Seat, ...],
        instances: tuple[Instance, ...],
        labels: dict[str, str],
    ) -> None:
        uid = claim.metadata.uid
        parts = self.state.parts(instances)
        tenant = self.tenant(claim.metadata.namespace).name
        if uid in self.state.tickets:
            self.enter(Served(uid, tenant, parts), instances)
        else:
            record = AllocationRecord(
                id=uid,
                tenant=tenant,
                want=Want(profile=parts[0].profile),
                count=len(parts),
                labels={"claim": claim.metadata.name, **labels},
                requested=moment(claim.metadata.creation_timestamp, self._clock()),
                placed=self._clock(),
                parts=parts,
            )
            self.enter(Allocated(record), instances)
        gpus = tuple(instance.gpu for instance in instances)
        self._claims[uid] = _Entered(claim.metadata.key, seats, gpus)

    def _leave(self, uid: str) -> None:
        del self._claims[uid]
        self._end(uid)

    def _end(self, uid: str) -> None:
        """Let go what a claim has, or waits for; with the last of its namespace if that is gone."""
        record = self.state.allocations[uid]
        ended = msgspec.structs.replace(record, ended=self._clock(), cause=Cause.RELEASED)
        self.enter(Ended(ended))
        if record.tenant in self._gone:
            self.drop_tenant(record.tenant)

    def _unclash(self, uid: str) -> None:
        clash = self.clashes.pop(uid, None)
        if clash is not None:
            for gpu in clash.gpus:
                self.pools.hold(gpu, uid, False)

    def _try_clashes(self) -> None:
        for uid, clash in list(self.clashes.items()):
            self._unclash(uid)
            self._enter_claim(clash.claim, seats_of(clash.claim))

    def _settle_again(self) -> None:
        """Enter the allocations whose devices have become known."""
        for uid, claim in self._allocated.items():
            entered = self._claims.get(uid)
            if entered is not None and len(entered.gpus) < len(entered.seats):
                self._leave(uid)  # only some of its devices were known
            if uid not in self._claims and uid not in self.clashes:
                self._enter_claim(claim, seats_of(claim))
        self._try_clashes()

    # Those who wait

    def wait(
        self,
        claim: ResourceClaim,
        wants: Sequence[Request],
        priority: int,
        labels: dict[str, str],
        reason: str,
        detail: str,
    ) -> None:
        """A claim waits for devices; shown to those who look, decided upon elsewhere."""
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
            tenant=self.tenant(claim.metadata.namespace).name,
            want=want,
            count=len(wants),
            priority=priority,
            labels={"claim": claim.metadata.name, **labels},
            requested=moment(claim.metadata.creation_timestamp, self._clock()),
            reason=reason,
            detail=detail,
        )
        self.enter(Queued(record, self.state.last_ticket + 1))

    def stop_waiting(self, uid: str) -> None:
        """A claim waits no longer."""
        if uid in self.state.tickets:
            self._end(uid)

    def parts(self, instances: Sequence[Instance]) -> tuple[Part, ...]:
        """Instances as quotas count them."""
        return self.state.parts(instances)


def seats_of(claim: ResourceClaim) -> tuple[Seat, ...]:
    """The devices that a claim has for itself; administrators' access takes nothing."""
    allocation = claim.status.allocation
    if allocation is None:
        return ()
    return tuple(
        Seat(result.driver, result.pool, result.device)
        for result in allocation.devices.results
        if not result.admin_access
    )


def _user(claim: ResourceClaim) -> dict[str, str]:
    """The pod that a claim is for, as a label, where the claim itself says so."""
    owners = [owner.name for owner in claim.metadata.owner_references if owner.kind == "Pod"]
    names = owners or [user.name for user in claim.status.reserved_for if user.resource == "pods"]
    return {"pod": names[0]} if names else {}
