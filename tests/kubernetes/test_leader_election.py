"""Leader election: one leader at a time, without trust in clocks."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from slicewise.kubernetes.api import Lease
from slicewise.kubernetes.api_client import ApiUnreachableError, ConflictError, NotFoundError
from slicewise.kubernetes.leader_election import NOTE, LeaderElector, running_clock


class OneLease:
    """The part of the API for a lease: one object, whose outdated versions are refused."""

    def __init__(self) -> None:
        self.body: dict[str, Any] | None = None
        self.version = 0
        self.cut = False

    def get(self, path: str, kind: type[Any]) -> Any:
        if self.cut:
            raise ApiUnreachableError("no answer")
        if self.body is None:
            raise NotFoundError(404, "NotFound", "no lease")
        return msgspec.convert(self.body, kind)

    def write(self, method: str, path: str, body: Any) -> bytes:
        if self.cut:
            raise ApiUnreachableError("no answer")
        meta = body["metadata"]
        if method == "POST":
            if self.body is not None:
                raise ConflictError(409, "AlreadyExists", "there is one")
        elif meta["resourceVersion"] != str(self.version):
            raise ConflictError(409, "Conflict", "it has changed")
        self.version += 1
        self.body = {**body, "metadata": {**meta, "resourceVersion": str(self.version)}}
        return b""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def replica(api: OneLease, name: str, clock: Clock) -> tuple[LeaderElector, list[bool]]:
    turns: list[bool] = []
    made = LeaderElector(api, "ns", "lease", name, turns.append, 10.0, clock)  # type: ignore[arg-type]
    return made, turns


@pytest.mark.parametrize("seconds", [1.0, 1.2, 1.49, 2.4, 3.4, 4.45, 15.0])
def test_the_lease_expires_for_its_holder_first(seconds: float) -> None:
    api, clock = OneLease(), Clock()
    holder = LeaderElector(api, "ns", "lease", "a", [].append, seconds, clock)  # type: ignore[arg-type]
    holder.beat()
    assert holder.valid()
    assert api.body is not None
    clock.now += api.body["spec"]["leaseDurationSeconds"]
    assert not holder.valid()


def test_a_candidate_takes_over_when_the_lease_expires() -> None:
    api, clock = OneLease(), Clock()
    a, turns = replica(api, "a", clock)
    b, _ = replica(api, "b", clock)
    a.beat()
    b.beat()
    assert (a.leads, b.leads) == (True, False)
    assert turns == [True]
    assert b.holder == "a"
    clock.now += 5
    a.beat()  # renews
    clock.now += 9.5
    assert not a.valid()  # it does not use the last part of its lease
    b.beat()
    assert not b.leads  # it saw the renewal only now
    clock.now += 10.5
    b.beat()
    assert b.leads
    assert b.valid()
    a.beat()
    assert not a.leads
    assert turns == [True, False]
    assert api.body is not None
    assert msgspec.convert(api.body, Lease).spec.lease_transitions == 1


def test_a_leader_that_cannot_renew_steps_down() -> None:
    api, clock = OneLease(), Clock()
    a, turns = replica(api, "a", clock)
    a.beat()
    api.cut = True
    clock.now += 4
    a.beat()
    assert a.leads
    assert "no answer" in a.trouble
    clock.now += 6
    a.beat()
    assert turns == [True, False]


def test_a_lease_of_a_former_process_of_the_same_name_must_expire() -> None:
    api, clock = OneLease(), Clock()
    a, _ = replica(api, "a", clock)
    a.beat()
    again, _ = replica(api, "a", clock)
    again.beat()
    assert not again.leads
    clock.now += 11
    again.beat()
    assert again.leads


def test_a_released_lease_is_acquired_at_once() -> None:
    api, clock = OneLease(), Clock()
    a, _ = replica(api, "a", clock)
    a.start()
    a.stop()
    assert not a.leads
    b, _ = replica(api, "b", clock)
    b.beat()
    assert b.leads


def test_one_of_two_concurrent_candidates_leads() -> None:
    api, clock = OneLease(), Clock()
    a, _ = replica(api, "a", clock)
    a.beat()
    b, _ = replica(api, "b", clock)
    b.beat()
    clock.now += 20
    seen = api.get("", Lease)
    b.beat()
    assert b.leads
    c, _ = replica(api, "c", clock)
    api.get = lambda path, kind: seen  # type: ignore[method-assign]
    clock.now += 20
    c.beat()
    clock.now += 20
    c.beat()
    assert not c.leads  # its write was refused: the lease had changed


def test_the_clock_runs() -> None:
    first = running_clock()
    assert running_clock() >= first > 0


def test_leading_again_after_another_leader_is_a_new_term() -> None:
    api, clock = OneLease(), Clock()
    a, turns = replica(api, "a", clock)
    a.beat()
    b, _ = replica(api, "b", clock)
    b.beat()
    clock.now += 11  # a sleeps meanwhile
    b.beat()
    assert b.leads
    b._release()
    a.beat()
    assert a.leads
    assert turns == [True, False, True]


def test_leading_again_after_the_lease_was_deleted_is_a_new_term() -> None:
    api, clock = OneLease(), Clock()
    a, turns = replica(api, "a", clock)
    a.beat()
    api.body = None
    a.beat()
    assert turns == [True, False, True]


def test_an_error_does_not_end_the_renewing_thread() -> None:
    api, clock = OneLease(), Clock()
    a, turns = replica(api, "a", clock)
    a.beat()
    api.get = None  # type: ignore[assignment, method-assign]
    clock.now += 11
    a.beat()
    assert turns == [True, False]
    assert "not callable" in a.trouble


def test_a_renewal_after_a_short_lapse_is_a_new_term() -> None:
    api, clock = OneLease(), Clock()
    a, turns = replica(api, "a", clock)
    a.beat()
    assert a.term == 1
    clock.now += 9.5  # the pending write was skipped
    assert not a.valid()
    a.beat()
    assert a.valid()
    assert a.term == 2
    assert turns == [True, False, True]


def test_a_lapse_seen_by_another_thread_during_a_renewal_starts_a_new_term() -> None:
    """Otherwise a write skipped in that moment would never be tried again."""
    api, clock = OneLease(), Clock()
    a, _ = replica(api, "a", clock)
    a.beat()
    clock.now += 8.9  # just inside the 90% of the lease that its holder uses
    seen: list[bool] = []
    observer = threading.Thread(target=lambda: seen.append(a.valid()))

    def overtaken() -> float:
        """The lease expires right after the renewal has read the clock."""
        now, clock.now = clock.now, 110.0
        a._clock = clock
        observer.start()
        observer.join(0.2)
        return now

    a._clock = overtaken
    a._hold(108.9)
    observer.join()
    assert seen == [a.term == 1]


def test_the_note_of_a_leader_reaches_the_next_one() -> None:
    api, clock = OneLease(), Clock()
    a, _ = replica(api, "a", clock)
    b, _ = replica(api, "b", clock)
    a.beat()
    assert api.body is not None
    assert "annotations" not in api.body["metadata"]
    a.note = "what a knows"
    a.beat()
    b.beat()
    assert b.note == ""
    clock.now += 11
    b.beat()
    assert (b.leads, b.note) == (True, "what a knows")
    b.beat()  # and does not get lost before it is replaced
    assert api.body["metadata"]["annotations"] == {NOTE: "what a knows"}
    b.note = "what b knows"
    b.start()
    b.stop()  # releases the lease
    a.beat()
    assert (a.leads, a.note) == (True, "what b knows")
