"""Messages to pods: the newest is written last, and none is repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.kubernetes.objects import pod

from slicewise.kubernetes.api_client import NotFoundError
from slicewise.kubernetes.event_recorder import UPDATE_SECONDS, EventRecorder, PlacementMessage
from slicewise.kubernetes.event_series import EventSeries, Regarding
from slicewise.kubernetes.stats import Stats


class Slow:
    """An API that writes nothing until it is released."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        self.said: list[str] = []
        self.gone = False

    def write(self, method: str, path: str, body: Any, content: str = "") -> bytes:
        if method == "PATCH":
            self.begun.set()
            assert self.let.wait(60)
            if self.gone:
                raise NotFoundError(404, "NotFound", "no pod")
            self.said.append(body["status"]["conditions"][0]["message"])
        return b""


def waits(text: str, reason: str = "Capacity") -> PlacementMessage:
    return PlacementMessage(False, reason, text)


def test_only_the_newest_message_is_written_after_one_in_flight() -> None:
    api = Slow()
    recorder = EventRecorder(api, "me", Stats())  # type: ignore[arg-type]
    one = pod("a")
    recorder.report(one, waits("first"))
    assert api.begun.wait(60)
    for number in range(100):
        recorder.report(one, waits(f"{number}", reason=f"R{number}"))
    recorder.report(one, PlacementMessage(True, "Placed", "last"))
    api.let.set()
    recorder._threads.shutdown()
    assert api.said == ["first", "last"]


def test_a_message_is_not_repeated_and_new_text_is_rate_limited() -> None:
    api, now = Slow(), [0.0]
    api.let.set()
    recorder = EventRecorder(api, "me", Stats(), lambda: now[0])  # type: ignore[arg-type]
    one = pod("a")
    for told in (waits("x"), waits("x"), waits("y")):
        recorder.report(one, told)
    now[0] = UPDATE_SECONDS
    recorder.report(one, waits("z"))
    recorder._threads.shutdown()
    assert api.said in (["x", "z"], ["z"])  # the first may not have been written in time


def test_messages_are_rate_limited_also_when_the_reason_flips() -> None:
    api, now = Recorded(), [0.0]
    recorder = EventRecorder(api, "me", Stats(), lambda: now[0])  # type: ignore[arg-type]
    recorder._threads = At()  # type: ignore[assignment]
    one = pod("a")
    for second in range(600):
        now[0] = float(second)
        recorder.report(one, waits(f"{second}", reason=("Capacity", "Reserved")[second % 2]))
    created = [body for method, _, body in api.events if method == "POST"]
    assert [body["reason"] for body in created] == ["WaitingCapacity", "WaitingReserved"]
    assert len(api.conditions) <= 3 * 600 / UPDATE_SECONDS
    updates = [
        (path, body["series"]["count"]) for method, path, body in api.events if body.get("series")
    ]
    assert {path for path, _ in updates} == {
        f"/apis/events.k8s.io/v1/namespaces/team/events/{body['metadata']['name']}"
        for body in created
    }
    assert max(count for _, count in updates) > 20  # the conditions in between are counted
    assert len(updates) <= 2 * 600 / UPDATE_SECONDS
    while not recorder.report(one, waits("the last", reason="Quota")):
        now[0] += 1.0
    assert api.conditions[-1]["message"] == "the last"


def test_an_event_that_the_api_has_deleted_or_that_is_old_is_created_again() -> None:
    api, now = Recorded(), [0.0]
    events = EventSeries(api, "me", lambda: now[0])  # type: ignore[arg-type]
    about = Regarding("Namespace", "team", "uid-team")
    for time, written in ((0.0, 1), (1.0, 1), (31.0, 2), (62.0, 4), (63.0, 4), (700.0, 5)):
        api.gone = time == 62.0
        now[0] = time
        events.record(about, True, "QuotaUnreadable", "Reading", "text")
        assert len(api.events) == written
    methods = [method for method, _, _ in api.events]
    assert methods == ["POST", "PATCH", "PATCH", "POST", "POST"]
    first = api.events[0][2]
    assert first["metadata"]["namespace"] == "default"  # that of objects without one
    assert "namespace" not in first["regarding"]
    assert api.events[1][2]["series"]["count"] == 3


def test_the_memory_of_series_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.kubernetes.event_series._MOST_SERIES", 2)
    api = Recorded()
    events = EventSeries(api, "me", lambda: 0.0)  # type: ignore[arg-type]
    for uid in ("a", "b", "a", "c", "b"):
        events.record(Regarding("Pod", uid, uid, "team"), False, "r", "x", "text")
    assert [body["regarding"]["uid"] for _, _, body in api.events] == ["a", "b", "c", "b"]


class Recorded:
    """An API that notes what is written."""

    def __init__(self) -> None:
        self.conditions: list[Any] = []
        self.events: list[tuple[str, str, Any]] = []
        self.gone = False

    def write(self, method: str, path: str, body: Any, content: str = "") -> bytes:
        if "/events" not in path:
            self.conditions += body["status"]["conditions"]
            return b""
        self.events.append((method, path, body))
        if self.gone and method == "PATCH":
            raise NotFoundError(404, "NotFound", "expired")
        return b""


class At:
    """An executor that runs everything at once."""

    def submit(self, work: Callable[..., None], *arguments: Any) -> None:
        work(*arguments)


def test_a_pod_that_never_waited_gets_no_message_and_a_deleted_pod_is_ignored() -> None:
    api, stats = Slow(), Stats()
    api.let.set()
    api.gone = True
    recorder = EventRecorder(api, "me", stats)  # type: ignore[arg-type]
    recorder.report(pod("a"), PlacementMessage(True, "Placed", "x"))
    recorder.report(pod("b"), waits("x"))
    recorder._threads.shutdown()
    assert api.said == []
    assert stats.messages_lost == 0
