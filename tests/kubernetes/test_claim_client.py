"""The claim client against an API that refuses or does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import claim

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.allocations import DeviceId, devices_of
from slicewise.kubernetes.api.common import ListMeta, ListOf
from slicewise.kubernetes.api_client import (
    ApiUnreachableError,
    ConflictError,
    KubernetesApiError,
    NotFoundError,
)
from slicewise.kubernetes.claim_client import (
    ClaimClient,
    Decision,
    Grant,
    NotLeadingError,
    NotWrittenError,
    needs_fence,
)

SEATS = (DeviceId("gpu.nvidia.com", "n1", "d0"),)
REFUSED = KubernetesApiError(422, "Invalid", "odd")


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

    def pages(self, path: str, kind: type[Any], fields: str = "") -> Iterator[ListOf[Any]]:
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
    assert list(caught.value.refused) == ["uid-b"]
    assert [devices_of(one) for one in caught.value.claims] == [(), ()]
    assert all("allocation" not in one["status"] for one in api.there.values())


def test_a_refused_clean_up_is_not_repeated_for_ever() -> None:
    api = Claims("a", "b")
    api.faults = {"status": [None, REFUSED, *[REFUSED] * 50], "meta": [None, None, REFUSED]}
    with pytest.raises(NotWrittenError) as caught:
        claim_client(api, valid=40).allocate(decision("a", "b", "c"))
    assert set(caught.value.refused) == {"uid-a", "uid-b"}
    assert api.writes < 10


def test_a_claim_deleted_meanwhile_is_no_error() -> None:
    api = Claims()
    with pytest.raises(NotWrittenError) as caught:
        claim_client(api).allocate(decision("a"))
    assert caught.value.claims == []
    assert not caught.value.refused
    assert claim_client(api).deallocate(claim("a", seats=[("n1", "d0")])) is None
    assert claim_client(api).confirm(claim("a", seats=[("n1", "d0")]), True, "why") is None


def test_a_refused_confirmation_or_deallocation_is_raised_at_once() -> None:
    """A writer thread must not wait for one claim."""
    api = Claims("a")
    (written,) = claim_client(api).allocate(decision("a"))
    api.faults = {"status": [REFUSED, REFUSED]}
    pauses: list[float] = []
    client = ClaimClient(api, lambda: True, pauses.append)  # type: ignore[arg-type]
    with pytest.raises(KubernetesApiError):
        client.confirm(written, True, "why")
    with pytest.raises(KubernetesApiError):
        client.deallocate(written)
    assert pauses == []
    confirmed = client.confirm(written, True, "why")
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


def test_pauses_grow_and_the_api_may_ask_for_longer_ones() -> None:
    api = Claims("a")
    (written,) = claim_client(api).allocate(decision("a"))
    api.faults = {"status": [ApiUnreachableError("no answer") for _ in range(8)]}
    api.faults["status"][2] = ApiUnreachableError("too many requests", 30.0)
    pauses: list[float] = []
    ClaimClient(api, lambda: True, pauses.append).deallocate(written)  # type: ignore[arg-type]
    assert len(pauses) == 8
    assert pauses[2] == 30.0
    assert 0.1 <= pauses[0] <= 0.2
    assert 2.5 <= pauses[7] <= 5.0


def test_share_ids_are_written_only_while_others_compete() -> None:
    api = Claims("a", "b")
    for name, tentative in (("a", True), ("b", False)):
        one = Decision("team/p", "n1", decision(name).grants, tentative, {})
        (written,) = claim_client(api).allocate(one)
        assert written.status.allocation is not None
        [result] = written.status.allocation.devices.results
        assert bool(result.share_id) == bool(result.binding_conditions) == tentative


FINALIZERS = ("resource.kubernetes.io/delete-protection", "other")


def test_only_claims_with_the_finalizer_are_fenced() -> None:
    api = Claims("a")
    (without,) = claim_client(api).list_claims()
    assert not needs_fence(without)
    assert claim_client(api).fence(without) is without
    assert api.writes == 0
    given = claim("g", seats=[("n1", "d0")], finalizers=FINALIZERS)
    assert not needs_fence(given)
    waiting = claim("a", finalizers=FINALIZERS)
    api.there[next(iter(api.there))] = msgspec.to_builtins(waiting)
    assert needs_fence(waiting)
    there = claim_client(api).fence(waiting)
    assert there is not None
    assert there.metadata.finalizers == ("other",)
    assert there.metadata.resource_version == "2"


def test_a_late_write_after_fencing_is_refused() -> None:
    api = Claims("a")
    late = claim_client(api)
    former = late._patch(claim("a"), {}, metadata={"finalizers": FINALIZERS[:1]})
    claim_client(api).fence(former)
    with pytest.raises(ConflictError):
        late._patch(former, {"allocation": {}}, "/status")


def test_a_claim_that_fencing_deletes_or_finds_deleted_is_gone() -> None:
    api = Claims("a")
    ending = claim("a", finalizers=FINALIZERS[:1], deletionTimestamp="2026-01-01T00:00:00Z")
    api.there[next(iter(api.there))] = msgspec.to_builtins(ending)
    assert claim_client(api).fence(ending) is None
    api.there.clear()
    assert claim_client(api).fence(ending) is None


def test_a_refused_fence_is_raised_and_an_unanswered_one_is_repeated() -> None:
    api = Claims("a")
    waiting = claim("a", finalizers=FINALIZERS)
    api.there[next(iter(api.there))] = msgspec.to_builtins(waiting)
    api.faults = {"meta": [ApiUnreachableError("cut off"), REFUSED]}
    with pytest.raises(KubernetesApiError):
        claim_client(api).fence(waiting)
    assert api.writes == 2
    api.faults = {"meta": [ConflictError(409, "Conflict", "changed")]}
    there = claim_client(api).fence(waiting)
    assert there is not None
    assert there.metadata.finalizers == ("other",)
