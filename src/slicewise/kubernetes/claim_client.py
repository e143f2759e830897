"""The claim client: writes, confirms and removes the allocations of ResourceClaims.

A write carries the version of the claim that the decision was based on, and is sent only while this
replica holds the lease. So no newer change is overwritten. A leader that was paused before a write
and replaced may still send it: see `ClaimClient.fence`.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.allocations import DeviceId, devices_of
from slicewise.kubernetes.api import DeviceClass, DeviceToleration, Pod, ResourceClaim
from slicewise.kubernetes.api.common import now_text
from slicewise.kubernetes.api_client import (
    APPLY,
    MERGE,
    ApiClient,
    ApiUnreachableError,
    ConflictError,
    KubernetesApiError,
    NotFoundError,
)
from slicewise.kubernetes.informer import CLAIMS, RESOURCE

FINALIZER = "resource.kubernetes.io/delete-protection"
CONFIRMED, CONFLICT = "slicewise.dev/confirmed", "slicewise.dev/conflict"

_RETRY_SECONDS, _LONGEST_SECONDS = 0.2, 5.0
"""The first and the longest pause before a retry if the API did not answer."""

_decode = msgspec.json.Decoder(ResourceClaim).decode


class NotLeadingError(SlicewiseError):
    """Raised when the lease has expired: another replica may be the leader."""


class NotWrittenError(SlicewiseError):
    """Raised when an allocation was not written and cannot arrive late either.

    ``claims`` are the claims as they are now. ``refused`` has, by uid, those that the API refused
    to change, and its words. ``deleted`` are the uids of claims that do not exist any more.
    """

    def __init__(
        self,
        why: str,
        claims: Sequence[ResourceClaim] = (),
        refused: Mapping[str, str] | None = None,
        deleted: Collection[str] = (),
    ) -> None:
        super().__init__(why)
        self.claims = claims
        self.refused = refused or {}
        self.deleted = deleted


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
        written = []
        for count, grant in enumerate(decision.grants, 1):
            try:
                written.append(self._allocate(grant, decision))
            except NotLeadingError:
                raise  # without the lease nothing can be removed either
            except SlicewiseError as error:
                raise self._withdraw_all(decision.grants[:count], error) from None
        return written

    def _allocate(self, grant: Grant, decision: Decision) -> ResourceClaim:
        claim = grant.claim
        if FINALIZER not in claim.metadata.finalizers:
            finalizers = [*claim.metadata.finalizers, FINALIZER]
            claim = self._patch(claim, {}, metadata={"finalizers": finalizers})
        body = {"allocation": allocation(grant, decision)}
        try:
            return self._patch(claim, body, "/status")
        except ApiUnreachableError:
            there = self.fence(claim)
            if there is not None and devices_of(there) == grant.devices:
                return there
            raise

    def _withdraw_all(self, grants: Sequence[Grant], error: SlicewiseError) -> NotWrittenError:
        """Remove what was written for a decision before an error, the last grant first."""
        if isinstance(error, ApiUnreachableError):
            self._patience()(error)
        refused = {grants[-1].claim.metadata.uid: str(error)} if is_refusal(error) else {}
        there, deleted = [], set()
        for grant in reversed(grants):
            uid = grant.claim.metadata.uid
            try:
                claim = self._withdraw(grant)
            except KubernetesApiError as refusal:
                refused[uid] = str(refusal)
                continue
            if claim is None:
                deleted.add(uid)
            else:
                there.append(claim)
        return NotWrittenError(str(error), there, refused, deleted)

    def _withdraw(self, grant: Grant) -> ResourceClaim | None:
        """Make sure that a grant is not written, also later; returns the claim if it exists."""
        while True:
            claim = self.refresh(grant.claim)
            if claim is None or devices_of(claim) != grant.devices or claim.status.reserved_for:
                return claim
            with suppress(ConflictError, NotFoundError):  # changed meanwhile: read it again
                return self._clear(claim)

    def deallocate(self, claim: ResourceClaim) -> ResourceClaim | None:
        """Remove an allocation that no pod uses; returns the claim, None if it has changed."""
        try:
            return self._clear(claim)
        except (ConflictError, NotFoundError):
            return None

    def _clear(self, claim: ResourceClaim) -> ResourceClaim:
        wait = self._patience()
        while True:
            try:
                return self._patch(claim, {"allocation": None, "devices": None}, "/status")
            except ApiUnreachableError as error:
                wait(error)

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
        wait = self._patience()
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
            except ApiUnreachableError as error:
                wait(error)

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

    def create(self, path: str, body: Mapping[str, Any]) -> None:
        """Create an object while this replica leads; it may exist already."""
        if not self._valid():
            raise NotLeadingError("the lease has expired; nothing was written")
        with suppress(ConflictError):
            self._api.write("POST", path, body)

    def list_claims(self) -> list[ResourceClaim]:
        """All claims as they are now: the watch may not have delivered the latest writes yet."""
        return [
            claim for page in self._api.pages(CLAIMS.path, ResourceClaim) for claim in page.items
        ]

    def refresh(self, claim: ResourceClaim) -> ResourceClaim | None:
        """Read a claim and fence it."""
        there = self._read(claim)
        return None if there is None else self.fence(there)

    def fence(self, claim: ResourceClaim) -> ResourceClaim | None:
        """Make sure that no allocation arrives that was decided before.

        An allocation is only sent with a version in which the claim has the finalizer, as the API
        has answered. So if it has none now, no earlier allocation can be accepted any more; and if
        it has one, removing it makes all earlier versions outdated. Unlike any addition, that is
        possible at every size of a claim. Returns the claim as it is now, None if it was deleted.
        """
        there: ResourceClaim | None = claim
        wait = self._patience()
        while there is not None and needs_fence(there):
            finalizers = [one for one in there.metadata.finalizers if one != FINALIZER]
            try:
                there = self._patch(there, {}, metadata={"finalizers": finalizers})
                ended = there.metadata.deletion_timestamp and not finalizers
                return None if ended else there
            except NotFoundError:
                return None
            except ConflictError:
                pass
            except ApiUnreachableError as error:
                wait(error)
            there = self._read(claim)
        return there

    def _patience(self) -> Callable[[ApiUnreachableError], None]:
        """Pauses that grow with each retry, with jitter, or are as long as the API asks for."""
        span = _RETRY_SECONDS

        def wait(error: ApiUnreachableError) -> None:
            nonlocal span
            self._pause(max(error.after, span * random.uniform(0.5, 1.0)))
            span = min(2 * span, _LONGEST_SECONDS)

        return wait

    def _patch(
        self,
        claim: ResourceClaim,
        status: Mapping[str, Any],
        part: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> ResourceClaim:
        """Patch this version of a claim, while this replica leads."""
        which = {"resourceVersion": claim.metadata.resource_version, "uid": claim.metadata.uid}
        body: dict[str, Any] = {"metadata": {**(metadata or {}), **which}}
        if status:
            body["status"] = status
        if not self._valid():
            raise NotLeadingError("the lease has expired; nothing was written")
        return _decode(self._api.write("PATCH", claim_path(claim) + part, body, MERGE))

    def _read(self, claim: ResourceClaim) -> ResourceClaim | None:
        """Read a claim, with retries; None if it was deleted."""
        wait = self._patience()
        while True:
            if not self._valid():
                raise NotLeadingError("the lease has expired; the outcome of the write is unknown")
            try:
                there = self._api.get(claim_path(claim), ResourceClaim)
                return there if there.metadata.uid == claim.metadata.uid else None
            except NotFoundError:
                return None
            except ApiUnreachableError as error:
                wait(error)


def needs_fence(claim: ResourceClaim) -> bool:
    """Whether an allocation that was decided before may still be accepted for a claim."""
    return claim.status.allocation is None and FINALIZER in claim.metadata.finalizers


def is_refusal(error: SlicewiseError) -> bool:
    """Whether the API refused a write and would probably refuse it again."""
    return isinstance(error, KubernetesApiError) and not isinstance(
        error, ConflictError | NotFoundError
    )


def claim_path(claim: ResourceClaim) -> str:
    """The API path of a claim."""
    meta = claim.metadata
    return f"{RESOURCE}/namespaces/{meta.namespace}/resourceclaims/{meta.name}"


def allocation(grant: Grant, decision: Decision) -> dict[str, Any]:
    """An allocation as kube-scheduler would write it; while others compete, with share ids.

    kube-scheduler keeps allocated devices in a set. If two claims name the same device for a
    moment, it frees the device as soon as one of them is deallocated. Shares are kept apart.
    """
    binding = {"bindingConditions": [CONFIRMED], "bindingFailureConditions": [CONFLICT]}

    tolerations = {
        one.name: {"tolerations": [_plain(toleration) for toleration in one.exactly.tolerations]}
        for one in grant.claim.spec.devices.requests
        if one.exactly is not None and one.exactly.tolerations
    }

    def guard() -> dict[str, Any]:
        return binding | {"shareID": str(uuid.uuid4())} if decision.tentative else {}

    return {
        "devices": {
            "results": [
                {"request": request, **device._asdict()} | guard() | tolerations.get(request, {})
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


def _plain(toleration: DeviceToleration) -> dict[str, Any]:
    """A toleration as in the request, which the API wants to see again in the allocation."""
    found: dict[str, Any] = msgspec.to_builtins(toleration)
    return {key: value for key, value in found.items() if value not in (None, "")}


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
