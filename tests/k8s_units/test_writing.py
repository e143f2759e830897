"""What is written to claims, against an API that refuses or does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.k8s_units.objects import claim

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api.common import ListMeta, ListOf
from slicewise.k8s.board import Seat, seats_of
from slicewise.k8s.link import ApiError, ConflictError, MissingError, UnreachableError
from slicewise.k8s.writing import Decision, Grant, NotLeadingError, NotWrittenError, Pen

SEATS = (Seat("gpu.nvidia.com", "n1", "d0"),)
REFUSED = ApiError(422, "Invalid", "odd")


class Claims:
    """The API as far as claims need it; ``faults`` are what comes of the next writes, by part.

    A fault that ``lands`` is one of an API that did what it was asked, and failed to say so.
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
            raise MissingError(404, "NotFound", "gone")
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
            raise MissingError(404, "NotFound", "gone")
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


def pen(api: Claims, valid: int = 1000) -> Pen:
    """A pen whose lease runs for so many writes."""
    return Pen(api, lambda: api.writes < valid, lambda _: None)  # type: ignore[arg-type]


def test_devices_are_written_once_and_with_a_finalizer() -> None:
    api = Claims("a")
    (written,) = pen(api).allocate(decision("a"))
    assert seats_of(written) == SEATS
    assert written.metadata.finalizers == ("resource.kubernetes.io/delete-protection",)
    assert api.writes == 2


@pytest.mark.parametrize("lands", [False, True])
def test_where_nobody_answers_it_is_found_out_what_was_written(lands: bool) -> None:
    api = Claims("a")
    api.lands = lands
    api.faults = {"status": [UnreachableError("cut off")]}
    if lands:
        (written,) = pen(api).allocate(decision("a"))
        assert seats_of(written) == SEATS
    else:
        with pytest.raises(NotWrittenError) as caught:
            pen(api).allocate(decision("a"))
        assert [seats_of(one) for one in caught.value.claims] == [()]
        assert not caught.value.refused


def test_what_is_refused_leaves_nothing_behind_and_is_said_to_be_refused() -> None:
    api = Claims("a", "b")
    api.faults = {"status": [None, REFUSED]}
    with pytest.raises(NotWrittenError) as caught:
        pen(api).allocate(decision("a", "b"))
    assert caught.value.refused
    assert [seats_of(one) for one in caught.value.claims] == [(), ()]
    assert all("allocation" not in one["status"] for one in api.there.values())


def test_what_cannot_be_taken_back_either_is_not_tried_for_ever() -> None:
    api = Claims("a", "b")
    api.faults = {"status": [None, REFUSED, *[REFUSED] * 50]}
    with pytest.raises(ApiError):
        pen(api, valid=40).allocate(decision("a", "b"))
    assert api.writes < 10


def test_a_claim_that_goes_meanwhile_is_no_trouble() -> None:
    api = Claims()
    with pytest.raises(NotWrittenError) as caught:
        pen(api).allocate(decision("a"))
    assert caught.value.claims == []
    assert not caught.value.refused
    assert pen(api).deallocate(claim("a", seats=[("n1", "d0")])) is None
    assert pen(api).confirm(claim("a", seats=[("n1", "d0")]), True, "why") is None


def test_a_confirmation_that_is_refused_is_to_be_tried_again_after_a_while() -> None:
    api = Claims("a")
    (written,) = pen(api).allocate(decision("a"))
    api.faults = {"status": [REFUSED]}
    pauses: list[float] = []
    patient = Pen(api, lambda: True, pauses.append)  # type: ignore[arg-type]
    with pytest.raises(ApiError):
        patient.confirm(written, True, "why")
    assert len(pauses) == 1
    confirmed = patient.confirm(written, True, "why")
    assert confirmed is not None
    assert confirmed.status.devices


def test_nothing_is_written_once_the_lease_is_over() -> None:
    api = Claims("a", "b")
    with pytest.raises(NotLeadingError):
        pen(api, valid=3).allocate(decision("a", "b"))
    assert api.writes == 3


def test_a_claim_that_changed_is_not_taken_back() -> None:
    api = Claims("a")
    (written,) = pen(api).allocate(decision("a"))
    assert pen(api).deallocate(claim("a", seats=[("n1", "d0")])) is None
    freed = pen(api).deallocate(written)
    assert freed is not None
    assert seats_of(freed) == ()


def test_what_the_api_refuses_to_take_back_is_to_be_tried_again_after_a_while() -> None:
    api = Claims("a")
    (written,) = pen(api).allocate(decision("a"))
    api.faults = {"status": [REFUSED]}
    pauses: list[float] = []
    patient = Pen(api, lambda: True, pauses.append)  # type: ignore[arg-type]
    assert patient.deallocate(written) is written
    assert len(pauses) == 1
    freed = patient.deallocate(written)
    assert freed is not None
    assert seats_of(freed) == ()


def test_a_new_leader_shuts_the_last_one_out_of_all_claims_that_name_our_class() -> None:
    api = Claims("a", "b")
    others = {"name": "r", "exactly": {"deviceClassName": "gpu"}}
    api.there["theirs"] = msgspec.to_builtins(claim("theirs", others))
    api.there["given"] = msgspec.to_builtins(claim("given", seats=[("n1", "d0")]))
    found = pen(api).fence("me")
    versions = {one.metadata.name: one.metadata.resource_version for one in found}
    assert versions == {"a": "2", "b": "2", "theirs": "1", "given": "1"}
