"""What the controller writes to the API, and how: allocations, their confirmation, their end.

A claim's devices are written with the version of the claim that the decision was made upon, and
only while this replica's lease runs. So nothing that changed meanwhile is overwritten, and a leader
that was paused and replaced is refused: see `fence`.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import DeviceClass, ResourceClaim
from slicewise.k8s.asks import read_ask
from slicewise.k8s.board import Seat, seats_of
from slicewise.k8s.link import (
    MERGE,
    ApiError,
    ConflictError,
    Link,
    MissingError,
    UnreachableError,
)
from slicewise.k8s.times import now_text
from slicewise.k8s.watching import CLAIMS, RESOURCE

FINALIZER = "resource.kubernetes.io/delete-protection"
CONFIRMED, CONFLICT = "slicewise.dev/confirmed", "slicewise.dev/conflict"
LEADER = "slicewise.dev/leader"
"""The annotation by which a new leader shuts out the old one."""

_AGAIN_SECONDS = 0.2
"""How long to wait where the API did not answer."""
_REFUSED_SECONDS = 5.0
"""Before something is tried again that the API refused, and that has to be done all the same."""

_decode = msgspec.json.Decoder(ResourceClaim).decode


class NotLeadingError(SlicewiseError):
    """The lease is over: somebody else may be deciding."""


class NotWrittenError(SlicewiseError):
    """Devices were not given, and will not be; ``claims`` are how the claims are now.

    ``refused``: nothing has changed meanwhile, the API just does not want it.
    """

    def __init__(self, why: str, claims: Sequence[ResourceClaim], refused: bool) -> None:
        super().__init__(why)
        self.claims = claims
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Grant:
    """Devices for one claim, by its requests."""

    claim: ResourceClaim
    requests: tuple[str, ...]
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """Devices for all claims of a pod, on one node."""

    pod: str
    node: str
    grants: tuple[Grant, ...]
    tentative: bool
    """Whether the pod must not be bound before the allocations are confirmed."""
    classes: Mapping[str, DeviceClass] = field(repr=False)


class Pen:
    """Writes claims; its methods block and may be called from several threads."""

    def __init__(
        self, link: Link, valid: Callable[[], bool], pause: Callable[[float], None] = time.sleep
    ) -> None:
        """``valid`` says whether this replica's lease runs at this moment."""
        self._link = link
        self._valid = valid
        self._pause = pause

    def allocate(self, decision: Decision) -> list[ResourceClaim]:
        """Write all allocations of a decision, or make sure that there are none, and raise."""
        try:
            return [self._allocate(grant, decision) for grant in decision.grants]
        except NotLeadingError:
            raise  # nothing can be made sure of
        except SlicewiseError as error:
            if isinstance(error, UnreachableError):
                self._pause(_AGAIN_SECONDS)
            there = [self._withdraw(grant) for grant in reversed(decision.grants)]
            now = [one for one in there if one is not None]
            raise NotWrittenError(str(error), now, is_refusal(error)) from None

    def _allocate(self, grant: Grant, decision: Decision) -> ResourceClaim:
        claim = grant.claim
        if FINALIZER not in claim.metadata.finalizers:
            finalizers = [*claim.metadata.finalizers, FINALIZER]
            claim = self._patch(claim, {}, metadata={"finalizers": finalizers})
        body = {"allocation": allocation(grant, decision)}
        try:
            return self._patch(claim, body, "/status")
        except UnreachableError:
            there = self._touch(claim)
            if there is not None and seats_of(there) == grant.seats:
                return there
            raise

    def _withdraw(self, grant: Grant) -> ResourceClaim | None:
        """See that a claim has not what was meant for it, now or later; how it is, if it is."""
        while True:
            claim = self._touch(grant.claim)
            if claim is None or seats_of(claim) != grant.seats or claim.status.reserved_for:
                return claim
            with suppress(ConflictError, MissingError):  # it has changed: how is it now?
                return self._clear(claim)

    def deallocate(self, claim: ResourceClaim) -> ResourceClaim | None:
        """Take back an allocation that no pod uses; returns the claim, None if it is another now.

        Where the API refuses, after a while, the claim is returned as it was.
        """
        try:
            return self._clear(claim)
        except (ConflictError, MissingError):
            return None
        except ApiError:
            self._pause(_REFUSED_SECONDS)
            return claim

    def _clear(self, claim: ResourceClaim) -> ResourceClaim:
        while True:
            try:
                return self._patch(claim, {"allocation": None, "devices": None}, "/status")
            except UnreachableError:
                self._pause(_AGAIN_SECONDS)

    def confirm(self, claim: ResourceClaim, confirmed: bool, why: str) -> ResourceClaim | None:
        """Let a pod be bound that waits for this, or say that it must not be."""
        condition = {
            "type": CONFIRMED if confirmed else CONFLICT,
            "status": "True",
            "reason": "Confirmed" if confirmed else "Conflict",
            "message": why,
            "lastTransitionTime": now_text(),
        }
        allocation = claim.status.allocation
        assert allocation is not None  # it is one of ours, and tentative
        devices = [
            {
                "driver": result.driver,
                "pool": result.pool,
                "device": result.device,
                "conditions": [condition],
            }
            | ({"shareID": result.share_id} if result.share_id else {})
            for result in allocation.devices.results
        ]
        while True:
            try:
                return self._patch(claim, {"devices": devices}, "/status")
            except ConflictError:  # the scheduler has added the pod, most likely
                there = self._look(claim)
                if there is None or there.status.allocation != allocation:
                    return None
                claim = there
            except MissingError:
                return None
            except UnreachableError:
                self._pause(_AGAIN_SECONDS)
            except ApiError:
                self._pause(_REFUSED_SECONDS)
                raise

    def fence(self, identity: str) -> list[ResourceClaim]:
        """Shut out whoever led before: touch every claim it might still give devices to.

        It may have been paused with a decision in hand, and wake up at any time. Its write carries
        the version of the claim it knew while its lease ran; after this there is a newer one.
        Returns all claims as they are then: what it gave to others may not be known here yet.
        """
        found = []
        for page in self._link.pages(CLAIMS.path, ResourceClaim):
            for claim in page.items:
                there: ResourceClaim | None = claim
                # As if there were no classes: whoever led before may have known others, or none.
                if claim.status.allocation is None and read_ask(claim, {}) is not None:
                    there = self._touch(claim, identity)
                if there is not None:
                    found.append(there)
        return found

    def _touch(self, claim: ResourceClaim, identity: str = "") -> ResourceClaim | None:
        """Change a claim a little, whatever it takes, and return it; None if it is gone.

        What was sent to it before, and has not arrived, is refused from then on.
        """
        # Different each time: what changes nothing makes no new version.
        mark = {"annotations": {LEADER: f"{identity} {now_text()} {secrets.token_hex(4)}".strip()}}
        while True:
            try:
                return self._patch(claim, {}, metadata=mark, free=True)
            except MissingError:
                return None
            except ConflictError:
                if self._look(claim) is None:
                    return None
            except UnreachableError:
                self._pause(_AGAIN_SECONDS)

    def _patch(
        self,
        claim: ResourceClaim,
        status: Mapping[str, Any],
        part: str = "",
        metadata: Mapping[str, Any] | None = None,
        free: bool = False,
    ) -> ResourceClaim:
        """Patch a claim of this very version, or of any if it is ``free``, while the lease runs."""
        meta = dict(metadata or {})
        if not free:
            meta |= {"resourceVersion": claim.metadata.resource_version}
        meta |= {"uid": claim.metadata.uid}
        body: dict[str, Any] = {"metadata": meta}
        if status:
            body["status"] = status
        if not self._valid():
            raise NotLeadingError("the lease is over; nothing was written")
        return _decode(self._link.write("PATCH", claim_path(claim) + part, body, MERGE))

    def _look(self, claim: ResourceClaim) -> ResourceClaim | None:
        """How a claim is, whatever it takes to find out; None if it is gone."""
        while True:
            if not self._valid():
                raise NotLeadingError("the lease is over; it is not known what was written")
            try:
                there = self._link.get(claim_path(claim), ResourceClaim)
                return there if there.metadata.uid == claim.metadata.uid else None
            except MissingError:
                return None
            except UnreachableError:
                self._pause(_AGAIN_SECONDS)


def is_refusal(error: SlicewiseError) -> bool:
    """Whether the same would be refused again, as far as one can know."""
    if isinstance(error, NotWrittenError):
        return error.refused
    return isinstance(error, ApiError) and not isinstance(error, ConflictError | MissingError)


def claim_path(claim: ResourceClaim) -> str:
    """Where a claim is in the API."""
    meta = claim.metadata
    return f"{RESOURCE}/namespaces/{meta.namespace}/resourceclaims/{meta.name}"


def allocation(grant: Grant, decision: Decision) -> dict[str, Any]:
    """An allocation as kube-scheduler would write it, with a share of its own for each device.

    kube-scheduler notes allocated devices in a set. Should two claims name the same device for a
    moment, it would forget the device as soon as one of them is released, and give it away again.
    It notes shares apart from each other.
    """
    binding = {"bindingConditions": [CONFIRMED], "bindingFailureConditions": [CONFLICT]}
    return {
        "devices": {
            "results": [
                {"request": request, **seat._asdict(), "shareID": str(uuid.uuid4())}
                | (binding if decision.tentative else {})
                for request, seat in zip(grant.requests, grant.seats, strict=True)
            ],
            "config": _config(grant.claim, decision.classes),
        },
        "nodeSelector": {
            "nodeSelectorTerms": [
                {
                    "matchFields": [
                        {"key": "metadata.name", "operator": "In", "values": [decision.node]}
                    ]
                }
            ]
        },
        "allocationTimestamp": now_text(),
    }


def _config(
    claim: ResourceClaim, classes: Mapping[str, DeviceClass]
) -> Sequence[Mapping[str, Any]]:
    """The parameters that go along with the devices: the classes' first, then the claim's."""
    config: list[dict[str, Any]] = []
    for request in claim.spec.devices.requests:
        assert request.exactly is not None
        device_class = classes.get(request.exactly.device_class_name)
        for one in () if device_class is None else device_class.spec.config:
            config.append(
                {
                    "source": "FromClass",
                    "requests": [request.name],
                    "opaque": msgspec.to_builtins(one.opaque),
                }
            )
    for one in claim.spec.devices.config:
        config.append(
            {
                "source": "FromClaim",
                "requests": list(one.requests),
                "opaque": msgspec.to_builtins(one.opaque),
            }
        )
    return config
