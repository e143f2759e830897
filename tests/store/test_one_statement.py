"""Commits by one statement: they leave what plain statements would have, or nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.control.answers import Answer
from slicewise.control.entries import Row, TenantSet
from slicewise.control.ports import FencedError, Kept, Key, StoreError
from slicewise.store import open_store
from slicewise.store.chain import checksum, link
from slicewise.store.one_statement import (
    FENCED,
    OUT_OF_STEP,
    TOGETHER,
    Line,
    answer_line,
    moving,
    prepare,
    row_line,
    write,
)
from slicewise.store.records import Record, Tail, records_of
from slicewise.store.sqlite import SqliteStore

START = 1_700_000_000.123
TABLES = """
CREATE TABLE leader (epoch INTEGER);
INSERT INTO leader VALUES (7);
CREATE TABLE journal (
    seq INTEGER PRIMARY KEY, at DOUBLE, epoch INTEGER, actor TEXT, origin TEXT, kind TEXT,
    tenant TEXT, subject TEXT, data TEXT, chain BLOB);
CREATE TABLE head (seq INTEGER, chain BLOB);
INSERT INTO head VALUES (0, X'00');
CREATE TABLE answers (
    tenant TEXT, key TEXT, digest TEXT, status SMALLINT, body BLOB, at DOUBLE, seq INTEGER,
    checksum BLOB, PRIMARY KEY (tenant, key));
"""
Answered = tuple[Key, Kept, float]
EMPTY = Tail(0, b"\0")


def database(kind: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
    driver = sqlite3.connect(":memory:", isolation_level=None, factory=kind)
    driver.executescript(TABLES)
    return driver


def contents(driver: sqlite3.Connection) -> list[list[tuple[object, ...]]]:
    return [
        driver.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
        for table in ("journal", "answers", "head")
    ]


def plainly(
    driver: sqlite3.Connection, records: Sequence[Record], kept: Sequence[Answered]
) -> None:
    """What `write` does, a statement for everything: its readable twin."""
    driver.execute("BEGIN")
    for record in records:
        driver.execute("INSERT INTO journal VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", record)
        driver.execute("UPDATE head SET seq = ?, chain = ?", (record[0], record[-1]))
    last = driver.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()[0]
    for (tenant, key), (digest, (status, body)), at in kept:
        values = (tenant, key, digest, status, body, at, last)
        driver.execute(
            "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, checksum(*values))
        )
    driver.execute("COMMIT")


moments = st.floats(0, 4e9, allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
commits = st.lists(
    st.tuples(
        st.lists(st.tuples(moments, texts, st.none() | texts, texts), max_size=70),
        st.lists(st.tuples(texts, st.binary(max_size=8), moments), max_size=70),
    ),
    max_size=4,
)


@given(commits=commits)
def test_the_same_as_plain_statements(
    commits: list[
        tuple[
            list[tuple[float, str, str | None, str]],
            list[tuple[str, bytes, float]],
        ]
    ],
) -> None:
    driver, twin = database(), database()
    prepare(driver)
    number = 0
    tail = EMPTY
    for rows, answered in commits:
        before = tail
        records: list[Record] = []
        for at, actor, tenant, data in rows:
            tail = Tail(tail.seq + 1, link(tail.chain, tail.seq + 1, at, 7, actor, "", data))
            records.append(
                (tail.seq, at, 7, actor, "", "kind", tenant, "subject", data, tail.chain)
            )
        kept: list[Answered] = []
        for tenant_, body, at in answered:
            number += 1
            kept.append((Key(tenant_, f"k{number}"), Kept("digest", Answer(201, body)), at))
        lines: list[Line] = [moving(7, before, tail), *map(row_line, records)]
        write(driver, [*lines, *(answer_line(*one, tail.seq) for one in kept)])
        plainly(twin, records, kept)
    assert contents(driver) == contents(twin)


def some(first: int, count: int) -> list[Row]:
    return [Row(seq, START, "me", TenantSet(f"t{seq}")) for seq in range(first, first + count)]


def rows_behind(before: Tail, count: int, epoch: int = 7) -> list[Line]:
    """A commit of so many rows."""
    records = records_of(some(before.seq + 1, count), epoch, before.chain)
    after = Tail(records[-1][0], records[-1][-1])
    return [moving(epoch, before, after), *map(row_line, records)]


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize(
    ("epoch", "before", "twice", "why"),
    [
        (6, EMPTY, 0, FENCED),
        (8, EMPTY, 0, FENCED),
        (7, EMPTY._replace(seq=1), 0, OUT_OF_STEP),
        (7, EMPTY._replace(chain=b"\1"), 0, OUT_OF_STEP),
        (7, EMPTY, 1, "UNIQUE constraint failed: journal.seq"),
    ],
)
def test_nothing_is_left_of_what_is_refused(
    count: int, epoch: int, before: Tail, twice: int, why: str
) -> None:
    driver = database()
    prepare(driver)
    lines = rows_behind(before, count, epoch)
    lines += lines[1 : 1 + twice]
    with pytest.raises(sqlite3.IntegrityError, match=f"^{why}$"):
        write(driver, lines)
    if driver.in_transaction:  # who called it undoes what took several statements
        driver.execute("ROLLBACK")
    assert contents(driver) == [[], [], [EMPTY]]
    write(driver, rows_behind(EMPTY, 1))
    assert len(contents(driver)[0]) == 1


def test_it_is_one_statement() -> None:
    said: list[str] = []

    class Listening(sqlite3.Connection):
        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            said.append(sql.split()[0])
            return super().execute(sql, parameters)

    driver = database(Listening)
    prepare(driver)
    said.clear()
    most = TOGETHER - 1  # and where the journal ends
    first = rows_behind(EMPTY, most)
    write(driver, first)
    assert said == ["INSERT"]
    said.clear()
    write(driver, rows_behind(Tail(most, first[0][5]), most + 1))  # type: ignore[arg-type]
    assert said == ["BEGIN", "INSERT", "INSERT", "COMMIT"]


@pytest.mark.parametrize("count", [2, 200])
def test_a_store_says_what_was_wrong_and_goes_on(tmp_path: Path, count: int) -> None:
    store = open_store(tmp_path)
    assert isinstance(store, SqliteStore)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    kept = (Key("t", "k"), Kept("d", Answer(201, b"{}")), START)
    store.append(epoch, some(1, count), [kept])
    with pytest.raises(FencedError, match=f"epoch {epoch - 1} is over"):
        store.append(epoch - 1, some(count + 1, count), [])
    with pytest.raises(StoreError, match=f"ends at entry {count}, so entry {count + 2} cannot"):
        store.append(epoch, some(count + 2, count), [])
    with pytest.raises(StoreError, match="there already"):
        store.append(epoch, some(count + 1, count), [kept])
    assert store.last_seq() == count
    store.append(epoch, [], [(Key("t", "other"), *kept[1:])])  # a refusal has no row
    store.append(epoch, some(count + 1, 1), [])
    answers = list(store.contents().answers())
    assert [(one.key, one.seq) for one in answers] == [("k", count), ("other", count)]
    assert store.rows(0, 1000) == some(1, count + 1)
    store.close()


def test_another_connection_can_do_it_too(tmp_path: Path) -> None:
    """After an error that costs the connection, the next one is prepared anew."""
    store = open_store(tmp_path)
    assert isinstance(store, SqliteStore)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    store.append(epoch, some(1, 1), [])
    store._drop()
    store.append(epoch, some(2, 1), [])
    assert store.last_seq() == 2
    store.close()
