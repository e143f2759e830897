"""The claim client: writes, confirms and removes the allocations of ResourceClaims.

A write carries the version of the claim that the decision was based on, and is sent only while this
replica holds the lease. So no newer change is overwritten, and the API refuses the writes of a
leader that was paused and replaced: see `fence`.
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
from slicewise.kubernetes.api import DeviceClass, Pod, ResourceClaim
from slicewise.kubernetes.api.common import now_text
from slicewise.kubernetes.api_client import (
    APPLY,
    MERGE,
    ApiClient,
    ApiError,
    ApiUnreachableError,
    ConflictError,
    NotFoundError,
)
from slicewise.kubernetes.cache import DeviceId, devices_of
from slicewise.kubernetes.claim_parameters import read_parameters
from slicewise.kubernetes.informer import CLAIMS, RESOURCE

FINALIZER = "resource.kubernetes.io/delete-protection"
CONFIRMED, CONFLICT = "slicewise.dev/confirmed", "slicewise.dev/conflict"
LEADER = "slicewise.dev/leader"
"""The annotation that a new leader writes to fence former ones."""

_RETRY_SECONDS = 0.2
"""The pause before a retry if the API did not answer."""
_REFUSED_SECONDS = 5.0
"""The pause before a retry if the API refused."""

_decode = msgspec.json.Decoder(ResourceClaim).decode


class NotLeadingError(SlicewiseError):
    """Raised when the lease has expired: another replica may be the leader."""


class NotWrittenError(SlicewiseError):
    """Raised when an allocation was not written and cannot arrive late either.

    ``claims`` are the current claims; ``refused`` tells that the API refused the write itself.
    """

    def __init__(self, why: str, claims: Sequence[ResourceClaim], refused: bool) -> None:
        super().__init__(why)
        self.claims = claims
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Grant:
    """The devices of one claim, with the request that each is for."""

    claim: ResourceClaim
    requests: tuple[str, ...]
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """The devices of all claims of a pod, on one node."""

    pod: str
    node: str
    grants: tuple[Grant, ...]
    tentative: bool
    """Whether the pod is held back until the allocations are confirmed."""
    classes: Mapping[str, DeviceClass] = field(repr=False)


class ClaimClient:
    """Writes claims; its methods block and are thread-safe."""

    def __init__(
        self,
        api: ApiClient,
        valid: Callable[[], bool],
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """``valid`` tells whether this replica holds the lease now."""
        self._api = api
        self._valid = valid
        self._pause = pause

    def allocate(self, decision: Decision) -> list[ResourceClaim]:
        """Write all allocations of a decision; on an error remove them again and raise."""
        try:
            return [self._allocate(grant, decision) for grant in decision.grants]
        except NotLeadingError:
            raise  # without the lease nothing can be removed either
        except SlicewiseError as error:
            if isinstance(error, ApiUnreachableError):
                self._pause(_RETRY_SECONDS)
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
        except ApiUnreachableError:
            there = self._touch(claim)
            if there is not None and devices_of(there) == grant.devices:
                return there
            raise

    def _withdraw(self, grant: Grant) -> ResourceClaim | None:
        """Make sure that a grant is not written, also later; returns the claim if it exists."""
        while True:
            claim = self._touch(grant.claim)
            if claim is None or devices_of(claim) != grant.devices or claim.status.reserved_for:
                return claim
            with suppress(ConflictError, NotFoundError):  # changed meanwhile: read it again
                return self._clear(claim)

    def deallocate(self, claim: ResourceClaim) -> ResourceClaim | None:
        """Remove an allocation that no pod uses; returns the claim, None if it has changed.

        If the API refuses, the claim is returned unchanged after a pause.
        """
        try:
            return self._clear(claim)
        except (ConflictError, NotFoundError):
            return None
        except ApiError:
            self._pause(_REFUSED_SECONDS)
            return claim

    def _clear(self, claim: ResourceClaim) -> ResourceClaim:
        while True:
            try:
                return self._patch(claim, {"allocation": None, "devices": None}, "/status")
            except ApiUnreachableError:
                self._pause(_RETRY_SECONDS)

    def confirm(self, claim: ResourceClaim, confirmed: bool, why: str) -> ResourceClaim | None:
        """Write the verdict on a tentative allocation; returns None if it does not exist."""
        condition = {
            "type": CONFIRMED if confirmed else CONFLICT,
            "status": "True",
            "reason": "Confirmed" if confirmed else "Conflict",
            "message": why,
            "lastTransitionTime": now_text(),
        }
        allocation = claim.status.allocation
        assert allocation is not None  # it is tentative
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
            except ConflictError:  # most likely kube-scheduler has reserved it
                there = self._read(claim)
                if there is None or there.status.allocation != allocation:
                    return None
                claim = there
            except NotFoundError:
                return None
            except ApiUnreachableError:
                self._pause(_RETRY_SECONDS)
            except ApiError:
                self._pause(_REFUSED_SECONDS)
                raise

    def record_claims(self, pod: Pod, claims: Mapping[str, str]) -> None:
        """Name the template claims of a pod in its status; see `PendingClaims.unrecorded_claims`.

        A server-side apply makes slicewise an owner of the entries: kube-controller-manager, which
        applies only some of them, does not remove the others then.
        """
        meta = pod.metadata
        statuses = [{"name": name, "resourceClaimName": claim} for name, claim in claims.items()]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": meta.name, "namespace": meta.namespace, "uid": meta.uid},
            "status": {"resourceClaimStatuses": statuses},
        }
        if not self._valid():
            raise NotLeadingError("the lease has expired; nothing was written")
        path = f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}/status"
        self._api.write("PATCH", path, body, APPLY, fieldManager="slicewise", force="true")

    def fence(self, identity: str) -> list[ResourceClaim]:
        """Fence former leaders: touch every claim they might still write to.

        A former leader may be paused with a decision and resume at any time. Its write carries the
        version of the claim that it knew while its lease ran, which is outdated after this.
        Returns all claims: our watch may not have delivered the former leader's writes yet.
        """
        found = []
        for page in self._api.pages(CLAIMS.path, ResourceClaim):
            for claim in page.items:
                there: ResourceClaim | None = claim
                # Without classes: a former leader may have known others, or none.
                if claim.status.allocation is None and read_parameters(claim, {}) is not None:
                    there = self._touch(claim, identity)
                if there is not None:
                    found.append(there)
        return found

    def _touch(self, claim: ResourceClaim, identity: str = "") -> ResourceClaim | None:
        """Change the annotation of a claim, with retries; returns None if it was deleted.

        The API refuses all earlier writes that arrive later.
        """
        # The value must differ each time, or the version would not change.
        mark = {"annotations": {LEADER: f"{identity} {now_text()} {secrets.token_hex(4)}".strip()}}
        while True:
            try:
                return self._patch(claim, {}, metadata=mark, free=True)
            except NotFoundError:
                return None
            except ConflictError:
                if self._read(claim) is None:
                    return None
            except ApiUnreachableError:
                self._pause(_RETRY_SECONDS)

    def _patch(
        self,
        claim: ResourceClaim,
        status: Mapping[str, Any],
        part: str = "",
        metadata: Mapping[str, Any] | None = None,
        free: bool = False,
    ) -> ResourceClaim:
        """Patch this version of a claim, or any if ``free``, while this replica leads."""
        meta = dict(metadata or {})
        if not free:
            meta |= {"resourceVersion": claim.metadata.resource_version}
        meta |= {"uid": claim.metadata.uid}
        body: dict[str, Any] = {"metadata": meta}
        if status:
            body["status"] = status
        if not self._valid():
            raise NotLeadingError("the lease has expired; nothing was written")
        return _decode(self._api.write("PATCH", claim_path(claim) + part, body, MERGE))

    def _read(self, claim: ResourceClaim) -> ResourceClaim | None:
        """Read a claim, with retries; None if it was deleted."""
        while True:
            if not self._valid():
                raise NotLeadingError("the lease has expired; the outcome of the write is unknown")
            try:
                there = self._api.get(claim_path(claim), ResourceClaim)
                return there if there.metadata.uid == claim.metadata.uid else None
            except NotFoundError:
                return None
            except ApiUnreachableError:
                self._pause(_RETRY_SECONDS)


def is_refusal(error: SlicewiseError) -> bool:
    """Whether the API refused a write and would probably refuse it again."""
    if isinstance(error, NotWrittenError):
        return error.refused
    return isinstance(error, ApiError) and not isinstance(error, ConflictError | NotFoundError)


def claim_path(claim: ResourceClaim) -> str:
    """The API path of a claim."""
    meta = claim.metadata
    return f"{RESOURCE}/namespaces/{meta.namespace}/resourceclaims/{meta.name}"


def allocation(grant: Grant, decision: Decision) -> dict[str, Any]:
    """An allocation as kube-scheduler would write it, with a unique share id for each device.

    kube-scheduler keeps allocated devices in a set. If two claims name the same device for a
    moment, it frees the device as soon as one of them is deallocated. Shares are kept apart.
    """
    binding = {"bindingConditions": [CONFIRMED], "bindingFailureConditions": [CONFLICT]}
    return {
        "devices": {
            "results": [
                {"request": request, **device._asdict(), "shareID": str(uuid.uuid4())}
                | (binding if decision.tentative else {})
                for request, device in zip(grant.requests, grant.devices, strict=True)
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
    """The parameters for the driver: those of the classes, then those of the claim."""
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
