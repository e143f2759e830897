"""Telling pods why they wait: the last word stands, and no more than that is kept."""

from __future__ import annotations

import threading
from typing import Any

from tests.k8s_units.objects import pod

from slicewise.k8s.link import MissingError
from slicewise.k8s.tally import Tally
from slicewise.k8s.telling import UPDATE_SECONDS, Teller, Told


class Slow:
    """An API that writes nothing before it is let."""

    def __init__(self) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        self.said: list[str] = []
        self.gone = False

    def write(self, method: str, path: str, body: Any, content: str = "") -> bytes:
        if method == "PATCH":
            self.begun.set()
            assert self.let.wait(60)
            if self.gone:
                raise MissingError(404, "NotFound", "no pod")
            self.said.append(body["status"]["conditions"][0]["message"])
        return b""


def waits(text: str, reason: str = "Capacity") -> Told:
    return Told(False, reason, text)


def test_what_is_told_while_another_word_is_written_comes_after_it_and_only_the_last() -> None:
    api = Slow()
    teller = Teller(api, "me", Tally())  # type: ignore[arg-type]
    one = pod("a")
    teller.say(one, waits("first"))
    assert api.begun.wait(60)
    for number in range(100):
        teller.say(one, waits(f"{number}", reason=f"R{number}"))
    teller.say(one, Told(True, "Placed", "last"))
    api.let.set()
    teller._threads.shutdown()
    assert api.said == ["first", "last"]


def test_the_same_is_not_told_twice_and_new_words_only_now_and_then() -> None:
    api, now = Slow(), [0.0]
    api.let.set()
    teller = Teller(api, "me", Tally(), lambda: now[0])  # type: ignore[arg-type]
    one = pod("a")
    for told in (waits("x"), waits("x"), waits("y")):
        teller.say(one, told)
    now[0] = UPDATE_SECONDS
    teller.say(one, waits("z"))
    teller._threads.shutdown()
    assert api.said in (["x", "z"], ["z"])  # the first may not have been written in time


def test_who_never_waited_is_told_nothing_and_a_pod_that_is_gone_is_no_loss() -> None:
    api, tally = Slow(), Tally()
    api.let.set()
    api.gone = True
    teller = Teller(api, "me", tally)  # type: ignore[arg-type]
    teller.say(pod("a"), Told(True, "Placed", "x"))
    teller.say(pod("b"), waits("x"))
    teller._threads.shutdown()
    assert api.said == []
    assert tally.untold == 0
