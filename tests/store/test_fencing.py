"""Two who believe that they lead: whatever the order of things, one of them cannot write."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import LiteralString

import psycopg
import pytest
from tests.postgres import PostgresServer
from tests.store.busy import START

from slicewise.control.entries import Row, TenantSet
from slicewise.control.ports import FencedError, StoreError
from slicewise.store import open_store
from slicewise.store.sql import SqlStore
from slicewise.store.verifying import verify


def row(seq: int, who: str = "me") -> Row:
    return Row(seq, START, who, TenantSet(f"t{seq}"))


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.database()


@pytest.fixture
def stores(url: str) -> Iterator[tuple[SqlStore, SqlStore]]:
    """Two processes' stores on one database."""
    one, two = open_store(None, url), open_store(None, url)
    yield one, two
    one.close()
    two.close()


class Outside:
    """Somebody else on the database, who holds things up."""

    def __init__(self, url: str) -> None:
        self._busy = psycopg.connect(url)
        self._looks = psycopg.connect(url, autocommit=True)

    def take_number(self, seq: int) -> None:
        """Write a row and do not commit: whoever writes that row, too, has to wait.

        By then it has looked at the epoch.
        """
        self._busy.execute(
            "INSERT INTO journal (seq, at, epoch, actor, origin, kind, subject, data, chain) "
            "VALUES (%s, 0, 0, '', '', '', '', '', '')",
            (seq,),
        )

    def take_over(self) -> None:
        """Take the lead and do not commit."""
        self._busy.execute("UPDATE leader SET epoch = epoch + 1, holder = 'outside'")

    def commit(self) -> None:
        self._busy.commit()

    def roll_back(self) -> None:
        self._busy.rollback()

    def wait_until_blocked(self, count: int) -> None:
        """Wait until so many calls wait for a lock."""
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
def outside(url: str) -> Iterator[Outside]:
    """Somebody who holds things up."""
    outside = Outside(url)
    yield outside
    outside.close()


class Call(threading.Thread):
    """A call in a thread of its own, and what came of it."""

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


def test_a_commit_under_way_comes_before_the_next_leader(
    stores: tuple[SqlStore, SqlStore], outside: Outside
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


def test_a_leader_that_is_replaced_meanwhile_writes_nothing(
    stores: tuple[SqlStore, SqlStore], outside: Outside
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


def test_a_takeover_that_fails_changes_nothing(
    stores: tuple[SqlStore, SqlStore], outside: Outside
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


def test_of_two_who_take_over_at_once_one_leads(stores: tuple[SqlStore, SqlStore]) -> None:
    one, two = stores
    for _ in range(20):
        calls = [Call(one.lead, "one", "", 3600), Call(two.lead, "two", "", 3600)]
        epochs = [call.result() for call in calls]
        assert epochs.count(None) == 1
        epoch = next(epoch for epoch in epochs if epoch is not None)
        assert isinstance(epoch, int)
        one.resign(epoch)


def test_an_append_that_was_given_up_and_still_commits_is_not_overwritten(
    stores: tuple[SqlStore, SqlStore], outside: Outside
) -> None:
    """The connection breaks, the writer reads the journal again, and only then the commit comes."""
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


def test_many_leaders_at_random_write_one_history(
    stores: tuple[SqlStore, SqlStore], outside: Outside
) -> None:
    """Leases so short that they are over at once: epochs are taken away all the time."""
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
