"""Messages to pods: the newest is written last, and none is repeated."""

from __future__ import annotations

import threading
from typing import Any

from tests.kubernetes.objects import pod

from slicewise.kubernetes.api_client import NotFoundError
from slicewise.kubernetes.event_recorder import UPDATE_SECONDS, EventRecorder, PlacementMessage
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
