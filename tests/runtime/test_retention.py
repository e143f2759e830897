"""Retention: small transactions within a time limit, once an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from slicewise.control.ports import FencedError, StoreError
from slicewise.journal.entries import Seconds
from slicewise.runtime.retention import Retention
from slicewise.store.memory import MemoryStore

HOUR, DAY = 3600.0, 86400.0


class ExpiringStore(MemoryStore):
    """A store with a number of transactions left to do."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.answers_left = self.entries_left = 0
        self.cuts: list[tuple[str, Seconds]] = []
        self.error: Exception | None = None

    def forget_answers(self, before: Seconds) -> int:
        """Delete the answers of one transaction."""
        self.cuts.append(("answers", before))
        self.answers_left -= 1
        return max(self.answers_left + 1, 0)

    def prune(self, epoch: int, before: Seconds, archive: Path | None) -> int:
        """Delete the entries of one transaction, or fail."""
        self.cuts.append(("entries", before))
        if self.error is not None:
            raise self.error
        self.entries_left -= 1
        return max(self.entries_left + 1, 0)


class Scene:
    """A store, its retention, and the time."""

    def __init__(self, journal_seconds: float = 90 * DAY) -> None:
        self.now: Seconds = 1e9
        self.store = ExpiringStore()
        self.problems: list[str] = []
        self.retention = Retention(
            self.store,
            DAY,
            journal_seconds,
            None,
            lambda: self.now,
            lambda: self.now,
            self.problems.append,
        )

    def run(self, seconds: float = 60) -> list[tuple[str, Seconds]]:
        """Run once; return the transactions by kind and age of the cut."""
        self.store.cuts.clear()
        self.retention.run(1, seconds)
        return [(kind, self.now - before) for kind, before in self.store.cuts]


def test_everything_expired_is_deleted_once_an_hour() -> None:
    scene = Scene()
    scene.store.answers_left, scene.store.entries_left = 1, 2
    assert scene.run() == [("answers", DAY)] * 2 + [("entries", 90 * DAY)] * 3
    scene.now += HOUR - 1
    assert scene.run() == []
    scene.now += 1
    assert scene.run() == [("answers", DAY), ("entries", 90 * DAY)]


def test_the_next_call_continues_after_the_time_limit() -> None:
    scene = Scene()
    scene.store.answers_left, scene.store.entries_left = 2, 1
    assert scene.run(seconds=0) == [("answers", DAY)]
    assert scene.run(seconds=0) == [("answers", DAY)]
    assert scene.run(seconds=0) == [("answers", DAY), ("entries", 90 * DAY)]
    assert scene.run(seconds=0) == [("answers", DAY), ("entries", 90 * DAY)]
    assert scene.run(seconds=0) == []


def test_entries_can_be_kept_for_ever() -> None:
    assert Scene(journal_seconds=0).run() == [("answers", DAY)]


def test_a_failure_is_reported_and_retried_an_hour_later() -> None:
    scene = Scene()
    scene.store.error = StoreError("the archive is full")
    scene.run()
    assert scene.problems == ["expired entries stay in the journal: the archive is full"]
    assert scene.run() == []
    scene.store.error = None
    scene.now += HOUR
    assert scene.run() == [("answers", DAY), ("entries", 90 * DAY)]


def test_a_replaced_leader_stops() -> None:
    scene = Scene()
    scene.store.error = FencedError("epoch 1 is over")
    with pytest.raises(FencedError):
        scene.run()
    assert scene.problems == []
