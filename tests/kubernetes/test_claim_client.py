"""The claim client against an API that refuses or does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import claim

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api.common import ListMeta, ListOf
from slicewise.kubernetes.api_client import (
    ApiError,
    ApiUnreachableError,
    ConflictError,
    NotFoundError,
)
from slicewise.kubernetes.cache import DeviceId, devices_of
from slicewise.kubernetes.claim_client import (
    ClaimClient,
    Decision,
    Grant,
    NotLeadingError,
    NotWrittenError,
)

SEATS = (DeviceId("gpu.nvidia.com", "n1", "d0"),)
REFUSED = ApiError(422, "Invalid", "odd")


class Claims:
    """The part of the API for claims; ``faults`` are the outcomes of the next writes, by part.

    With a fault that ``lands`` the write takes effect, but its answer is an error.
    """

    def __init__(self, *names: str) -> None:
        self.there: dict[str, dict[str, Any]] = {}
        for name in names:
            made = claim(name)
            path = f"/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/{name}"
            self.there[path] = msgspec.to_builtins(made)
        self.faults: dict[str, list[SlicewiseError | None]] = {}
        self.lands = False
        self.writes = 0

    def get(self, path: str, kind: type[Any]) -> Any:
        if path not in self.there:
            raise NotFoundError(404, "NotFound", "gone")
        return msgspec.convert(self.there[path], kind)

    def pages(self, path: str, kind: type[Any]) -> Iterator[ListOf[Any]]:
        yield ListOf(ListMeta(), [msgspec.convert(one, kind) for one in self.there.values()])

    def write(self, method: str, path: str, body: Any, content: str) -> bytes:
        self.writes += 1
        whole = path.removesuffix("/status")
        waiting = self.faults.get("status" if path.endswith("/status") else "meta", [])
        fault = waiting.pop(0) if waiting else None
        if fault is not None and not self.lands:
            raise fault
        if whole not in self.there:
            raise NotFoundError(404, "NotFound", "gone")
        old = self.there[whole]
        meta = dict(body["metadata"])
        version = meta.pop("resourceVersion", old["metadata"]["resourceVersion"])
        if version != old["metadata"]["resourceVersion"]:
            raise ConflictError(409, "Conflict", "changed")
        self.there[whole] = {
            **old,
            "metadata": {**old["metadata"], **meta, "resourceVersion": str(int(version) + 1)},
            "status": {
                key: value
                for key, value in {**old["status"], **body.get("status", {})}.items()
                if value is not None
            },
        }
        if fault is not None:
            raise fault
        return msgspec.json.encode(self.there[whole])


def decision(*names: str) -> Decision:
    grants = tuple(Grant(claim(name), ("r",), SEATS) for name in names)
    return Decision("team/p", "n1", grants, False, {})


def claim_client(api: Claims, valid: int = 1000) -> ClaimClient:
    """A claim client whose lease lasts for this many writes."""
    return ClaimClient(api, lambda: api.writes < valid, lambda _: None)  # type: ignore[arg-type]


def test_an_allocation_is_written_once_with_a_finalizer() -> None:
    api = Claims("a")
    (written,) = claim_client(api).allocate(decision("a"))
    assert devices_of(written) == SEATS
    assert written.metadata.finalizers == ("resource.kubernetes.io/delete-protection",)
    assert api.writes == 2


@pytest.mark.parametrize("lands", [False, True])
def test_the_outcome_of_an_unanswered_write_is_read_back(lands: bool) -> None:
    api = Claims("a")
    api.lands = lands
    api.faults = {"status": [ApiUnreachableError("cut off")]}
    if lands:
        (written,) = claim_client(api).allocate(decision("a"))
        assert devices_of(written) == SEATS
    else:
        with pytest.raises(NotWrittenError) as caught:
            claim_client(api).allocate(decision("a"))
        assert [devices_of(one) for one in caught.value.claims] == [()]
        assert not caught.value.refused


def test_a_refused_write_leaves_nothing_behind_and_reports_the_refusal() -> None:
    api = Claims("a", "b")
    api.faults = {"status": [None, REFUSED]}
    with pytest.raises(NotWrittenError) as caught:
        claim_client(api).allocate(decision("a", "b"))
    assert caught.value.refused
    assert [devices_of(one) for one in caught.value.claims] == [(), ()]
    assert all("allocation" not in one["status"] for one in api.there.values())


def test_a_refused_clean_up_is_not_repeated_for_ever() -> None:
    api = Claims("a", "b")
    api.faults = {"status": [None, REFUSED, *[REFUSED] * 50]}
    with pytest.raises(ApiError):
        claim_client(api, valid=40).allocate(decision("a", "b"))
    assert api.writes < 10


def test_a_claim_deleted_meanwhile_is_no_error() -> None:
    api = Claims()
    with pytest.raises(NotWrittenError) as caught:
        claim_client(api).allocate(decision("a"))
    assert caught.value.claims == []
    assert not caught.value.refused
    assert claim_client(api).deallocate(claim("a", seats=[("n1", "d0")])) is None
    assert claim_client(api).confirm(claim("a", seats=[("n1", "d0")]), True, "why") is None


def test_a_refused_confirmation_raises_after_a_pause() -> None:
    api = Claims("a")
    (written,) = claim_client(api).allocate(decision("a"))
    api.faults = {"status": [REFUSED]}
    pauses: list[float] = []
    patient = ClaimClient(api, lambda: True, pauses.append)  # type: ignore[arg-type]
    with pytest.raises(ApiError):
        patient.confirm(written, True, "why")
    assert len(pauses) == 1
    confirmed = patient.confirm(written, True, "why")
    assert confirmed is not None
    assert confirmed.status.devices


def test_nothing_is_written_after_the_lease_has_expired() -> None:
    api = Claims("a", "b")
    with pytest.raises(NotLeadingError):
        claim_client(api, valid=3).allocate(decision("a", "b"))
    assert api.writes == 3


def test_a_changed_claim_is_not_deallocated() -> None:
    api = Claims("a")
    (written,) = claim_client(api).allocate(decision("a"))
    assert claim_client(api).deallocate(claim("a", seats=[("n1", "d0")])) is None
    freed = claim_client(api).deallocate(written)
    assert freed is not None
    assert devices_of(freed) == ()


def test_a_refused_deallocation_returns_the_claim_after_a_pause() -> None:
    api = Claims("a")
    (written,) = claim_client(api).allocate(decision("a"))
    api.faults = {"status": [REFUSED]}
    pauses: list[float] = []
    patient = ClaimClient(api, lambda: True, pauses.append)  # type: ignore[arg-type]
    assert patient.deallocate(written) is written
    assert len(pauses) == 1
    freed = patient.deallocate(written)
    assert freed is not None
    assert devices_of(freed) == ()


def test_a_new_leader_fences_all_claims_of_our_classes() -> None:
    api = Claims("a", "b")
    others = {"name": "r", "exactly": {"deviceClassName": "gpu"}}
    api.there["theirs"] = msgspec.to_builtins(claim("theirs", others))
    api.there["given"] = msgspec.to_builtins(claim("given", seats=[("n1", "d0")]))
    found = claim_client(api).fence("me")
    versions = {one.metadata.name: one.metadata.resource_version for one in found}
    assert versions == {"a": "2", "b": "2", "theirs": "1", "given": "1"}
