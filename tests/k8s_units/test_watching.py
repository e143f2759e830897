"""Watches: what they report, and that nothing makes them fall silent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from slicewise.k8s.api import Happening, ListMeta, ListOf
from slicewise.k8s.link import ExpiredError, UnreachableError
from slicewise.k8s.watching import NODES, Changed, Gone, Listed, News, Trouble, Watch


def raw(name: str, version: int) -> msgspec.Raw:
    made = {"metadata": {"name": name, "resourceVersion": str(version)}}
    return msgspec.Raw(msgspec.json.encode(made))


class Script:
    """An API whose watches go as told; each is a list of happenings, or how it fails."""

    def __init__(self, *watches: list[Happening] | Exception) -> None:
        self.watches = list(watches)
        self.begun: list[str] = []
        self.lists = 0

    def pages(self, path: str, kind: type[Any]) -> Iterator[ListOf[Any]]:
        self.lists += 1
        yield ListOf(ListMeta(resource_version="5", continue_="more"), [raw("a", 3)])
        yield ListOf(ListMeta(resource_version="5"), [raw("b", 4)])

    @contextmanager
    def watch(self, path: str, version: str, seconds: int) -> Iterator[Iterator[Happening]]:
        self.begun.append(version)
        if not self.watches:
            raise UnreachableError("that was all")
        next_one = self.watches.pop(0)
        if isinstance(next_one, Exception):
            raise next_one
        yield iter(next_one)


def reported(script: Script, until: str = "that was all") -> list[News]:
    """What a watch reports until it is in this trouble."""
    inbox: SimpleQueue[News] = SimpleQueue()
    watch = Watch(script, NODES, inbox.put)  # type: ignore[arg-type]
    watch.start()
    news = []
    while not (isinstance(one := inbox.get(timeout=60), Trouble) and one.text == until):
        news.append(one)
    watch.stop()
    return news


def test_everything_is_listed_and_then_followed_from_there() -> None:
    script = Script(
        [
            Happening("MODIFIED", raw("a", 6)),
            Happening("BOOKMARK", raw("", 8)),
            Happening("DELETED", raw("b", 9)),
        ]
    )
    news = reported(script)
    assert [type(one) for one in news] == [Listed, Listed, Changed, Gone]
    assert [(one.first, one.last) for one in news[:2]] == [(True, False), (False, True)]  # type: ignore[union-attr]
    assert script.begun == ["5", "9"]
    assert script.lists == 1


def test_a_watch_that_cannot_go_on_lists_again() -> None:
    script = Script(ExpiredError(410, "Expired", "too old"), [])
    assert [type(one) for one in reported(script)] == [Listed] * 4
    assert script.lists == 2


def test_what_is_too_old_again_and_again_is_tried_later() -> None:
    expired = ExpiredError(410, "Expired", "too old")
    news = reported(
        Script(expired, expired, expired, [Happening("MODIFIED", raw("a", 6))], expired)
    )
    told = [one.text if isinstance(one, Trouble) else type(one).__name__ for one in news]
    once = ["Listed", "Listed"]
    assert told == [*once, *once, str(expired), *once, *once, "", "Changed", *once]


@pytest.mark.parametrize("mistake", [RuntimeError("odd"), KeyError("odd")])
def test_no_mistake_makes_a_watch_fall_silent(mistake: Exception) -> None:
    news = reported(Script(mistake, []))
    assert [type(one) for one in news] == [Listed, Listed, Trouble, Listed, Listed, Trouble]
    first, last = (one for one in news if isinstance(one, Trouble))
    assert "odd" in first.text
    assert last.text == ""
