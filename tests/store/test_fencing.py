"""Two processes that consider themselves the leader: in any order, only one can write."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import LiteralString

import psycopg
import pytest
from tests.postgres import PostgresServer
from tests.store.busy import START
from tests.tenants import ref

from slicewise.control.ports import FencedError, StoreError
from slicewise.journal.entries import Row, TenantSet
from slicewise.store import open_store
from slicewise.store.sql import SqlStore
from slicewise.store.verification import verify


def row(seq: int, who: str = "me") -> Row:
    return Row(seq, START, who, TenantSet(ref(f"t{seq}")))


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.database()


@pytest.fixture
def stores(url: str) -> Iterator[tuple[SqlStore, SqlStore]]:
    """The stores of two processes on one database."""
    one, two = open_store(None, url), open_store(None, url)
    yield one, two
    one.close()
    two.close()


class LockingSession:
    """Another session of the database, which holds locks."""

    def __init__(self, url: str) -> None:
        self._busy = psycopg.connect(url)
        self._looks = psycopg.connect(url, autocommit=True)

    def take_number(self, seq: int) -> None:
        """Write a row without committing: another writer of that row must wait.

        By then it has looked at the epoch.
        """
        self._busy.execute(
            "INSERT INTO journal (seq, at, epoch, actor, origin, kind, subject, data, chain) "
            "VALUES (%s, 0, 0, '', '', '', '', '', '')",
            (seq,),
        )

    def take_over(self) -> None:
        """Become the leader without committing."""
        self._busy.execute("UPDATE leader SET epoch = epoch + 1, holder = 'outside'")

    def commit(self) -> None:
        self._busy.commit()

    def roll_back(self) -> None:
        self._busy.rollback()

    def wait_until_blocked(self, count: int) -> None:
        """Wait until this many calls wait for a lock."""
        while self.ask(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND datname = current_database()"
        ) != [(count,)]:
            pass

    def ask(self, question: LiteralString) -> list[tuple[object, ...]]:
        return self._looks.execute(question).fetchall()

    def close(self) -> None:
        self._busy.close()
        self._looks.close()


@pytest.fixture
def outside(url: str) -> Iterator[LockingSession]:
    """A session that holds locks."""
    outside = LockingSession(url)
    yield outside
    outside.close()


class Call(threading.Thread):
    """A call in its own thread, and its outcome."""

    def __init__(self, function: object, *arguments: object) -> None:
        super().__init__()
        self._function, self._arguments = function, arguments
        self.outcome: object = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._function(*self._arguments)  # type: ignore[operator]
        except Exception as error:
            self.outcome = error

    def result(self) -> object:
        self.join()
        return self.outcome


def test_a_new_leader_waits_for_a_commit_in_progress(
    stores: tuple[SqlStore, SqlStore], outside: LockingSession
) -> None:
    one, two = stores
    epoch = one.lead("one", "", 0)
    assert epoch is not None
    outside.take_number(1)
    append = Call(one.append, epoch, [row(1)], [])
    outside.wait_until_blocked(1)  # it has looked at the epoch, and cannot write yet
    takeover = Call(two.lead, "two", "", 3600)
    outside.wait_until_blocked(2)
    outside.roll_back()
    assert append.result() is None
    assert takeover.result() == epoch + 1
    assert two.rows(0, 10) == [row(1)]
    with pytest.raises(FencedError):
        one.append(epoch, [row(2)], [])


def test_a_replaced_leader_writes_nothing(
    stores: tuple[SqlStore, SqlStore], outside: LockingSession
) -> None:
    one, two = stores
    epoch = one.lead("one", "", 0)
    assert epoch is not None
    outside.take_over()
    append = Call(one.append, epoch, [row(1)], [])
    outside.wait_until_blocked(1)  # it waits for the row of the leader, which still shows its epoch
    outside.commit()
    assert isinstance(append.result(), FencedError)
    assert two.rows(0, 10) == []


def test_a_failed_takeover_changes_nothing(
    stores: tuple[SqlStore, SqlStore], outside: LockingSession
) -> None:
    one, _ = stores
    epoch = one.lead("one", "", 0)
    assert epoch is not None
    outside.take_over()
    append = Call(one.append, epoch, [row(1)], [])
    outside.wait_until_blocked(1)
    outside.roll_back()
    assert append.result() is None
    assert one.rows(0, 10) == [row(1)]


def test_one_of_two_concurrent_takeovers_succeeds(stores: tuple[SqlStore, SqlStore]) -> None:
    one, two = stores
    for _ in range(20):
        calls = [Call(one.lead, "one", "", 3600), Call(two.lead, "two", "", 3600)]
        epochs = [call.result() for call in calls]
        assert epochs.count(None) == 1
        epoch = next(epoch for epoch in epochs if epoch is not None)
        assert isinstance(epoch, int)
        one.resign(epoch)


def test_a_commit_after_its_timeout_is_not_overwritten(
    stores: tuple[SqlStore, SqlStore], outside: LockingSession
) -> None:
    """The connection breaks, the writer reads the journal again, and then the commit succeeds."""
    one, two = stores
    epoch = one.lead("one", "", 3600)
    assert epoch is not None
    outside.take_number(1)
    first = Call(one.append, epoch, [row(1, "first")], [])
    outside.wait_until_blocked(1)
    assert two.rows(0, 10) == []
    second = Call(two.append, epoch, [row(1, "second"), row(2, "second")], [])
    outside.wait_until_blocked(2)
    outside.roll_back()
    outcomes = [first.result(), second.result()]
    assert outcomes.count(None) == 1
    assert sum(isinstance(outcome, StoreError) for outcome in outcomes) == 1
    who = "first" if outcomes[0] is None else "second"
    assert [found.actor for found in one.rows(0, 10)] == [who] * (1 if who == "first" else 2)


def test_random_changes_of_leader_produce_one_history(
    stores: tuple[SqlStore, SqlStore], outside: LockingSession
) -> None:
    """Leases expire at once, so epochs change all the time."""
    written: list[tuple[int, int, str]] = []
    fenced = 0

    def process(number: int) -> None:
        nonlocal fenced
        store, chance, who = stores[number % 2], random.Random(number), f"p{number}"
        for _ in range(25):
            epoch = store.lead(who, "", 0)
            if epoch is None:
                continue
            for _ in range(chance.randrange(1, 4)):
                seq = store.last_seq() + 1
                try:
                    store.append(epoch, [row(seq, who)], [])
                except FencedError:
                    fenced += 1
                    break
                except StoreError:
                    continue
                written.append((seq, epoch, who))

    processes = [Call(process, number) for number in range(4)]
    assert [each.result() for each in processes] == [None] * 4
    kept = outside.ask("SELECT seq, epoch, actor FROM journal ORDER BY seq")
    assert kept == sorted(written)
    assert fenced > 0
    assert verify(stores[0]).findings == []
