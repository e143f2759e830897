"""Commits on SQLite: the result of one statement per row, or no change."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tenants import ref

from slicewise.control.answers import Answer
from slicewise.control.ports import FencedError, IdempotencyKey, Kept, StoreError
from slicewise.journal.entries import Row, TenantSet
from slicewise.store import open_store
from slicewise.store.sqlite import _INSERT_ANSWERS, _INSERT_ROWS, SqliteStore, _insert

START = 1_700_000_000.123
TABLES = """
CREATE TABLE journal (
    seq INTEGER PRIMARY KEY, at DOUBLE, epoch INTEGER, actor TEXT, origin TEXT, kind TEXT,
    tenant TEXT, subject TEXT, data TEXT, chain BLOB);
CREATE TABLE answers (
    tenant TEXT, key TEXT, digest TEXT, status SMALLINT, body BLOB, at DOUBLE, seq INTEGER,
    checksum BLOB, PRIMARY KEY (tenant, key));
"""


def database() -> sqlite3.Connection:
    driver = sqlite3.connect(":memory:", isolation_level=None)
    driver.executescript(TABLES)
    return driver


def contents(driver: sqlite3.Connection) -> list[list[tuple[object, ...]]]:
    return [
        driver.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
        for table in ("journal", "answers")
    ]


def insert_one_by_one(
    driver: sqlite3.Connection, table: str, rows: Sequence[Sequence[object]]
) -> None:
    """The readable twin of `_insert`."""
    for row in rows:
        driver.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


moments = st.floats(0, 4e9, allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@given(
    rows=st.lists(st.tuples(moments, texts, st.none() | texts, texts), max_size=250),
    answers=st.lists(st.tuples(texts, st.binary(max_size=8), moments), max_size=250),
)
def test_many_rows_in_a_statement_are_the_same_as_one_by_one(
    rows: list[tuple[float, str, str | None, str]], answers: list[tuple[str, bytes, float]]
) -> None:
    driver, twin = database(), database()
    journal = [
        (seq, at, 7, actor, "", "kind", tenant, "subject", data, bytes([seq % 256]))
        for seq, (at, actor, tenant, data) in enumerate(rows, 1)
    ]
    kept = [
        (tenant, f"k{number}", "digest", 201, body, at, number, b"checksum")
        for number, (tenant, body, at) in enumerate(answers)
    ]
    _insert(driver, _INSERT_ROWS, journal)
    _insert(driver, _INSERT_ANSWERS, kept)
    insert_one_by_one(twin, "journal", journal)
    insert_one_by_one(twin, "answers", kept)
    assert contents(driver) == contents(twin)


def some(first: int, count: int) -> list[Row]:
    return [Row(seq, START, "me", TenantSet(ref(f"t{seq}"))) for seq in range(first, first + count)]


@pytest.mark.parametrize("count", [2, 200])
def test_a_refused_commit_changes_nothing_and_the_store_stays_usable(
    tmp_path: Path, count: int
) -> None:
    store = open_store(tmp_path)
    assert isinstance(store, SqliteStore)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    kept = (IdempotencyKey("t", "k"), Kept("d", Answer(201, b"{}")), START)
    store.append(epoch, some(1, count), [kept])
    with pytest.raises(FencedError, match=f"epoch {epoch - 1} is over"):
        store.append(epoch - 1, some(count + 1, count), [])
    with pytest.raises(StoreError, match=f"ends at entry {count}, so entry {count + 2} cannot"):
        store.append(epoch, some(count + 2, count), [])
    with pytest.raises(StoreError, match="already exists"):
        store.append(epoch, some(count + 1, count), [kept])
    with pytest.raises(FencedError, match=f"epoch {epoch + 1} is over"):
        store.append(epoch + 1, some(count + 1, count), [])
    assert store.last_seq() == count
    assert store.span().last == count
    assert [row.seq for row in store.contents().rows()] == list(range(1, count + 1))
    store.append(epoch, [], [(IdempotencyKey("t", "other"), *kept[1:])])  # a refusal has no row
    store.append(epoch, some(count + 1, 1), [])
    answers = list(store.contents().answers())
    assert [(one.key, one.seq) for one in answers] == [("k", count), ("other", count)]
    assert store.rows(0, 1000) == some(1, count + 1)
    store.close()


@pytest.mark.parametrize("count", [2, 200])
def test_a_commit_after_another_end_of_the_journal_is_refused(tmp_path: Path, count: int) -> None:
    store = open_store(tmp_path)
    assert isinstance(store, SqliteStore)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    store.append(epoch, some(1, 1), [])
    with store.transaction() as connection:
        connection.exec_driver_sql("UPDATE head SET chain = X'01'")
    with pytest.raises(StoreError, match="ends at entry 1, so entry 2 cannot"):
        store.append(epoch, some(2, count), [])
    assert [row.seq for row in store.contents().rows()] == [1]
    store.close()


def test_a_commit_on_a_new_connection(tmp_path: Path) -> None:
    """After an error that closes the connection, the store opens another."""
    store = open_store(tmp_path)
    assert isinstance(store, SqliteStore)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    store.append(epoch, some(1, 1), [])
    store._drop()
    store.append(epoch, some(2, 1), [])
    assert store.last_seq() == 2
    store.close()
