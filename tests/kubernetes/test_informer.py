"""Watches: their notifications, and that no error ends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest

from slicewise.kubernetes.api import ListMeta, ListOf, WatchEvent
from slicewise.kubernetes.api_client import ApiUnreachableError, ExpiredError, NotFoundError
from slicewise.kubernetes.informer import (
    NODES,
    TAINT_RULES,
    Changed,
    Deleted,
    Listed,
    Watch,
    WatchError,
    WatchNotification,
)


def raw(name: str, version: int) -> msgspec.Raw:
    made = {"metadata": {"name": name, "resourceVersion": str(version)}}
    return msgspec.Raw(msgspec.json.encode(made))


class Script:
    """An API with scripted watches; each is a list of events, or a failure."""

    def __init__(self, *watches: list[WatchEvent] | Exception) -> None:
        self.watches = list(watches)
        self.begun: list[str] = []
        self.lists = 0

    def pages(self, path: str, kind: type[Any], fields: str = "") -> Iterator[ListOf[Any]]:
        self.lists += 1
        yield ListOf(ListMeta(resource_version="5", continue_="more"), [raw("a", 3)])
        yield ListOf(ListMeta(resource_version="5"), [raw("b", 4)])

    @contextmanager
    def watch(
        self, path: str, version: str, seconds: int, fields: str = ""
    ) -> Iterator[Iterator[WatchEvent]]:
        self.begun.append(version)
        if not self.watches:
            raise ApiUnreachableError("that was all")
        next_one = self.watches.pop(0)
        if isinstance(next_one, Exception):
            raise next_one
        yield iter(next_one)


def reported(script: Script, until: str = "that was all") -> list[WatchNotification]:
    """What a watch reports until it reports this problem."""
    inbox: SimpleQueue[WatchNotification] = SimpleQueue()
    watch = Watch(script, NODES, inbox.put)  # type: ignore[arg-type]
    watch.start()
    news = []
    while not (isinstance(one := inbox.get(timeout=60), WatchError) and one.text == until):
        news.append(one)
    watch.stop()
    return news


def test_a_watch_starts_at_the_version_of_the_list() -> None:
    script = Script(
        [
            WatchEvent("MODIFIED", raw("a", 6)),
            WatchEvent("BOOKMARK", raw("", 8)),
            WatchEvent("DELETED", raw("b", 9)),
        ]
    )
    news = reported(script)
    assert [type(one) for one in news] == [Listed, Listed, Changed, Deleted]
    assert [(one.first, one.last) for one in news[:2]] == [(True, False), (False, True)]  # type: ignore[union-attr]
    assert script.begun == ["5", "9"]
    assert script.lists == 1


def test_an_expired_watch_lists_again() -> None:
    script = Script(ExpiredError(410, "Expired", "too old"), [])
    assert [type(one) for one in reported(script)] == [Listed] * 4
    assert script.lists == 2


def test_repeated_expiry_causes_a_pause() -> None:
    expired = ExpiredError(410, "Expired", "too old")
    news = reported(
        Script(expired, expired, expired, [WatchEvent("MODIFIED", raw("a", 6))], expired)
    )
    told = [one.text if isinstance(one, WatchError) else type(one).__name__ for one in news]
    once = ["Listed", "Listed"]
    assert told == [*once, *once, str(expired), *once, *once, "", "Changed", *once]


@pytest.mark.parametrize("mistake", [RuntimeError("odd"), KeyError("odd")])
def test_no_error_ends_a_watch(mistake: Exception) -> None:
    news = reported(Script(mistake, []))
    assert [type(one) for one in news] == [Listed, Listed, WatchError, Listed, Listed, WatchError]
    first, last = (one for one in news if isinstance(one, WatchError))
    assert "odd" in first.text
    assert last.text == ""


def test_a_kind_that_the_cluster_does_not_serve_counts_as_empty() -> None:
    script = Script()
    inbox: SimpleQueue[WatchNotification] = SimpleQueue()

    def absent(*_: object) -> Iterator[ListOf[Any]]:
        raise NotFoundError(404, "NotFound", "the server could not find the requested resource")

    script.pages = absent  # type: ignore[method-assign, assignment]
    watch = Watch(script, TAINT_RULES, inbox.put)  # type: ignore[arg-type]
    watch.start()
    assert inbox.get(timeout=60) == Listed(TAINT_RULES, [], True, True)
    watch.stop()
