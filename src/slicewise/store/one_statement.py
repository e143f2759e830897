"""A commit in one statement: everything is inserted into a view, whose triggers put it in place.

The driver lets other threads run during a statement and waits for its turn afterwards. Where the
event loop is busy that wait is longer than the statement, so that a commit of five statements,
from BEGIN to COMMIT, takes several times as long as one that checks and inserts all of it by
itself. What belongs to the connection is temporary: the database does not know of it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache
from itertools import chain

from slicewise.control.entries import Seconds
from slicewise.control.ports import Kept, Key
from slicewise.store.records import Record, Tail, answer_of

Line = tuple[int | float | str | bytes | None, ...]
"""What it is, and its columns, as many as a row of the journal has."""

FENCED = "slicewise: fenced"
OUT_OF_STEP = "slicewise: out of step"
_CHECK, _ROW, _ANSWER = range(3)
_COLUMNS = "abcdefghij"
_WIDTH = 1 + len(_COLUMNS)
_VALUES = 32_766 if sqlite3.sqlite_version_info >= (3, 32) else 999
TOGETHER = min(160, _VALUES // _WIDTH)
"""Lines in one statement: what a batch usually comes to, as far as SQLite takes it."""
STATEMENTS = TOGETHER + 64
"""How many the driver keeps prepared: one for each number of lines, and whatever else is asked."""

_PREPARE = (
    f"CREATE TEMP VIEW batch (what, {', '.join(_COLUMNS)}) AS SELECT {', '.join('0' * _WIDTH)}",
    f"""
    CREATE TEMP TRIGGER batch_check INSTEAD OF INSERT ON batch WHEN NEW.what = {_CHECK} BEGIN
        SELECT RAISE(ABORT, '{FENCED}') WHERE (SELECT epoch FROM main.leader) IS NOT NEW.a;
        SELECT RAISE(ABORT, '{OUT_OF_STEP}')
            WHERE NOT EXISTS (SELECT 1 FROM main.head WHERE seq = NEW.b AND chain = NEW.c);
        UPDATE head SET seq = NEW.d, chain = NEW.e WHERE seq <> NEW.d;
    END""",
    f"""
    CREATE TEMP TRIGGER batch_row INSTEAD OF INSERT ON batch WHEN NEW.what = {_ROW} BEGIN
        INSERT INTO journal (seq, at, epoch, actor, origin, kind, tenant, subject, data, chain)
            VALUES (NEW.a, NEW.b, NEW.c, NEW.d, NEW.e, NEW.f, NEW.g, NEW.h, NEW.i, NEW.j);
    END""",
    f"""
    CREATE TEMP TRIGGER batch_answer INSTEAD OF INSERT ON batch WHEN NEW.what = {_ANSWER} BEGIN
        INSERT INTO answers (tenant, key, digest, status, body, at, seq, checksum)
            VALUES (NEW.a, NEW.b, NEW.c, NEW.d, NEW.e, NEW.f, NEW.g, NEW.h);
    END""",
)


def prepare(driver: sqlite3.Connection) -> None:
    """Make the view and its triggers, for as long as the connection lasts."""
    for statement in _PREPARE:
        driver.execute(statement)


def moving(epoch: int, before: Tail, after: Tail) -> Line:
    """Comes first: nothing is written unless this epoch leads, and the journal ends there."""
    return (_CHECK, epoch, *before, *after, None, None, None, None, None)


def row_line(record: Record) -> Line:
    """A row of the journal."""
    return (_ROW, *record)


def answer_line(key: Key, kept: Kept, at: Seconds, seq: int) -> Line:
    """An answer that is to be remembered; ``seq`` is the last row when it was given."""
    return (_ANSWER, *answer_of(key, kept, at, seq), None, None)


def write(driver: sqlite3.Connection, lines: Sequence[Line]) -> None:
    """Write all lines or none: as a rule by one statement, which is a transaction by itself."""
    if len(lines) <= TOGETHER:
        _insert(driver, lines)
        return
    driver.execute("BEGIN IMMEDIATE")
    for done in range(0, len(lines), TOGETHER):
        _insert(driver, lines[done : done + TOGETHER])
    driver.execute("COMMIT")


def _insert(driver: sqlite3.Connection, lines: Sequence[Line]) -> None:
    driver.execute(_inserting(len(lines)), list(chain.from_iterable(lines)))


@cache  # the driver keeps the statement prepared, and looks it up by this text
def _inserting(count: int) -> str:
    marks = ", ".join([f"({', '.join('?' * _WIDTH)})"] * count)
    return f"INSERT INTO batch VALUES {marks}"
