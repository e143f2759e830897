"""The writer: durable before acknowledged, and one way back from every failure."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from tests.control.office import A100

from slicewise.control import writer as writer_module
from slicewise.control.actors import internal
from slicewise.control.commands import AddNode, Create, Release, SetTenant, Terms
from slicewise.control.entries import QuotaRecord, Row, Seconds, Want
from slicewise.control.image import Image, image_of
from slicewise.control.memory import MemoryJournal
from slicewise.control.ports import Kept, Key, StoreError
from slicewise.control.state import State
from slicewise.control.writer import (
    NO_DATABASE,
    NOT_LEADING,
    STOPPING,
    UNKNOWN_OUTCOME,
    Batch,
    Job,
    Told,
    Writer,
    load,
)


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now: Seconds = 1000.0

    def __call__(self) -> Seconds:
        return self.now


class Weak(MemoryJournal):
    """A journal that fails on demand, before or after it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_before = self.fail_after = self.unreadable = 0
        self.appends = 0
        self.hold = threading.Event()
        self.hold.set()

    def append(
        self, epoch: int, rows: Sequence[Row], answers: Iterable[tuple[Key, Kept, Seconds]]
    ) -> None:
        """Keep, unless it is to fail."""
        self.hold.wait()
        self.appends += 1
        if self.fail_before:
            self.fail_before -= 1
            raise StoreError("the disk is full")
        super().append(epoch, rows, answers)
        if self.fail_after:
            self.fail_after -= 1
            raise StoreError("the connection was lost")

    def rows(self, after: int, limit: int) -> list[Row]:
        """Read, unless it is to fail."""
        if self.unreadable:
            self.unreadable -= 1
            raise StoreError("nobody there")
        return super().rows(after, limit)


class Plant:
    """A writer at work and all that it delivered."""

    def __init__(self, journal: Weak, **options: Any) -> None:
        self.journal = journal
        self.clock = Clock()
        self.batches: queue.Queue[Batch] = queue.Queue()
        self.rows: list[Row] = []
        ids = itertools.count()
        self.writer = Writer(
            journal,
            State,
            1,
            self.clock,
            lambda letter: f"{letter}{next(ids)}",
            self.batches.put,
            lambda: 0.0,
            **options,
        )
        self.writer.start()

    def next(self) -> Batch:
        """The next batch delivered."""
        batch = self.batches.get()
        self.rows += batch.rows
        return batch

    def ask(self, command: Any, key: str | None = None, digest: str = "d") -> Told:
        """One command, and its answer."""
        self.writer.submit(Job(command, ME, Key("acme", key) if key else None, digest))
        while not (batch := self.next()).told:
            pass
        (told,) = batch.told
        return told


@pytest.fixture
def journal() -> Weak:
    """With a tenant and a node in it."""
    return Weak()


@pytest.fixture
def plant(journal: Weak, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plant]:
    """A writer with a tenant and one GPU, which does not wait long to try again."""
    monkeypatch.setattr(writer_module, "RETRY_SECONDS", (0.001,))
    plant = Plant(journal)
    assert plant.ask(SetTenant("acme", QuotaRecord(), True)).answer.status == 201
    assert plant.ask(AddNode("n0", A100, 1)).answer.status == 201
    yield plant
    plant.writer.stop()


ME = internal("me")
ONE = Create("acme", Terms(Want(profile="3g.40gb")))


def _body(told: Told) -> dict[str, Any]:
    body = msgspec.json.decode(told.answer.body)
    assert isinstance(body, dict)
    return body


def test_what_is_answered_is_kept(plant: Plant) -> None:
    told = plant.ask(ONE)
    assert told.answer.status == 201
    assert plant.rows == plant.journal.kept_rows
    state = load(plant.journal, State())
    assert _body(told)["id"] in state.allocations


def test_commands_that_come_meanwhile_share_a_commit(plant: Plant) -> None:
    plant.journal.hold.clear()
    before = plant.journal.appends
    for _ in range(9):
        plant.writer.submit(Job(ONE, ME))
    plant.journal.hold.set()
    told = 0
    while told < 9:
        told += len(plant.next().told)
    assert plant.journal.appends - before <= 2


def test_a_batch_has_a_largest_size(journal: Weak) -> None:
    plant = Plant(journal, max_batch=2)
    plant.ask(SetTenant("acme", QuotaRecord(), True))
    plant.journal.hold.clear()
    for _ in range(7):
        plant.writer.submit(Job(ONE, ME))
    plant.journal.hold.set()
    sizes: list[int] = []
    while sum(sizes) < 7:
        sizes.append(len(plant.next().told))
    assert max(sizes) <= 2
    plant.writer.stop()


def test_a_key_is_answered_once_and_the_same_for_ever(plant: Plant) -> None:
    first = plant.ask(ONE, key="k1")
    again = plant.ask(ONE, key="k1")
    assert again.answer == first.answer
    assert (first.replayed, again.replayed) == (False, True)
    assert plant.ask(ONE, key="k1", digest="other").answer.status == 422
    assert plant.ask(ONE, key="k2").answer.status == 201
    full = plant.ask(ONE, key="k3")
    assert full.answer.status == 409
    plant.ask(Release(_body(first)["id"]))
    assert plant.ask(ONE, key="k3").answer == full.answer
    assert plant.ask(ONE, key="k4").answer.status == 201


def test_a_mistake_may_be_corrected_under_the_same_key(plant: Plant) -> None:
    wrong = Create("nobody", ONE.terms)
    assert plant.ask(wrong, key="k").answer.status == 404
    assert plant.ask(ONE, key="k").answer.status == 201


def test_the_same_key_twice_in_one_batch(plant: Plant) -> None:
    plant.journal.hold.clear()
    for _ in range(3):
        plant.writer.submit(Job(ONE, ME, Key("acme", "k"), "d"))
    plant.journal.hold.set()
    told: list[Told] = []
    while len(told) < 3:
        told += plant.next().told
    assert len({t.answer for t in told}) == 1
    assert len(load(plant.journal, State()).allocations) == 1


def test_a_failed_commit_leaves_nothing(plant: Plant) -> None:
    plant.journal.fail_before = 1
    lost = plant.ask(ONE, key="k")
    assert lost.answer.status == 503
    assert _body(lost)["detail"] == UNKNOWN_OUTCOME
    assert not load(plant.journal, State()).allocations
    again = plant.ask(ONE, key="k")
    assert (again.answer.status, again.replayed) == (201, False)
    assert plant.rows == plant.journal.kept_rows
    assert plant.writer.trouble is None


def test_a_commit_that_only_looked_like_a_failure_is_found(plant: Plant) -> None:
    plant.journal.fail_after = 1
    plant.writer.submit(Job(ONE, ME, Key("acme", "k"), "d"))
    assert plant.next().told[0].answer.status == 503
    caught_up = plant.next()
    assert (len(caught_up.rows), caught_up.told) == (1, [])
    again = plant.ask(ONE, key="k")
    assert (again.answer.status, again.replayed) == (201, True)
    assert len(load(plant.journal, State()).allocations) == 1
    assert plant.rows == plant.journal.kept_rows


def test_while_there_is_no_database_everybody_is_told(plant: Plant) -> None:
    plant.journal.fail_before = 1
    plant.journal.unreadable = 1_000_000
    assert plant.ask(ONE).answer.status == 503
    told = plant.ask(ONE)
    assert _body(told)["detail"] == NO_DATABASE
    assert plant.writer.trouble == "nobody there"
    plant.journal.unreadable = 0
    while (told := plant.ask(ONE)).answer.status == 503:
        pass
    assert told.answer.status == 201


def test_stopping_without_a_database_is_possible(plant: Plant) -> None:
    plant.journal.fail_before = 1
    plant.journal.unreadable = 1_000_000
    assert plant.ask(ONE).answer.status == 503
    plant.writer.stop()
    plant.journal.unreadable = 0


def test_whoever_is_fenced_writes_no_more(plant: Plant) -> None:
    plant.journal.epoch = 2
    told = plant.ask(ONE)
    assert _body(told)["detail"] == NOT_LEADING
    plant.writer.stop()
    assert plant.writer.fenced
    assert plant.ask(ONE).answer.status == 503
    assert not load(plant.journal, State()).allocations


def test_time_alone_ends_leases(plant: Plant) -> None:
    plant.ask(Create("acme", Terms(Want(profile="7g.80gb"), lease=0.01)))
    plant.clock.now += 1
    batch = plant.next()
    assert [row.entry.__class__.__name__ for row in batch.rows] == ["Ended"]
    assert not batch.told


def test_stopping_finishes_what_was_handed_in_and_keeps_an_image(plant: Plant) -> None:
    plant.journal.hold.clear()
    for _ in range(5):
        plant.writer.submit(Job(ONE, ME))
    stopper = threading.Thread(target=plant.writer.stop)
    stopper.start()
    plant.journal.hold.set()
    stopper.join()
    told: list[Told] = []
    while len(told) < 5:
        told += plant.next().told
    assert {t.answer.status for t in told} <= {201, 409, 503}
    assert plant.journal.images[-1].seq == len(plant.journal.kept_rows)
    assert _body(plant.ask(ONE))["detail"] == STOPPING


def test_where_no_image_can_be_kept_it_goes_on_all_the_same(
    journal: Weak, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(image: Image) -> None:
        raise StoreError("the disk is full")

    loads: list[None] = []
    monkeypatch.setattr(journal, "keep_image", full)
    monkeypatch.setattr(journal, "last_image", lambda: loads.append(None))
    problems: list[str] = []
    plant = Plant(journal, rows_between_images=3, warn=problems.append)
    plant.ask(SetTenant("acme", QuotaRecord(), True))
    plant.ask(AddNode("n0", A100, 1))
    begun = len(loads)
    for _ in range(5):
        plant.ask(ONE)
    plant.writer.stop()
    assert not plant.writer.alive
    assert len(loads) == begun  # the journal was not read anew: nobody doubts what was committed
    assert 1 <= len(problems) <= len(journal.kept_rows) // 3 + 1
    assert "the disk is full" in problems[0]
    assert plant.writer.trouble is None


def test_images_are_kept_as_the_journal_grows_and_read_at_the_start(journal: Weak) -> None:
    plant = Plant(journal, rows_between_images=3)
    plant.ask(SetTenant("acme", QuotaRecord(), True))
    plant.ask(AddNode("n0", A100, 1))
    plant.ask(ONE)
    plant.ask(ONE)
    plant.ask(ONE)
    plant.writer.stop()
    assert len(journal.images) >= 2
    complete = State()
    for row in journal.kept_rows:
        complete.apply(row)
    assert image_of(load(journal, State())) == image_of(complete)
    # Whoever takes over delivers only what the receiver does not know yet.
    heir = Plant(journal, delivered=len(journal.kept_rows) - 1)
    assert [row.seq for row in heir.next().rows] == [len(journal.kept_rows)]
    assert heir.ask(ONE).answer.status == 409
    heir.writer.stop()
    assert heir.writer.waiting == 0


def test_a_start_that_read_many_rows_keeps_an_image_soon(journal: Weak) -> None:
    plant = Plant(journal, rows_between_images=1000)
    plant.ask(SetTenant("acme", QuotaRecord(), True))
    plant.ask(AddNode("n0", A100, 1))
    plant.ask(ONE)
    assert not journal.images  # and then it is killed
    heir = Plant(journal, rows_between_images=4, delivered=len(journal.kept_rows))
    assert heir.ask(ONE).answer.status == 201
    assert heir.ask(ONE).answer.status == 409
    assert journal.images
    heir.writer.stop()
    plant.writer.stop()
