"""A commit as most services make it, for bench_service.py: a transaction, statement by statement.

The service itself commits by one statement (`slicewise.store.one_statement`), which serves
requests that share no commit as well. So that is not what a service without shared commits would
be like; this is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slicewise.control.entries import Row, Seconds
from slicewise.control.ports import Kept, Key
from slicewise.store.records import Tail, answer_of, fenced, out_of_step, records_of
from slicewise.store.sqlite import SqliteStore

_STANDING = "SELECT (SELECT epoch FROM leader), seq, chain FROM head"
_ROW = (
    "INSERT INTO journal (seq, at, epoch, actor, origin, kind, tenant, subject, data, chain) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_ANSWER = (
    "INSERT INTO answers (tenant, key, digest, status, body, at, seq, checksum) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)


def append(
    store: SqliteStore,
    epoch: int,
    rows: Sequence[Row],
    answers: Iterable[tuple[Key, Kept, Seconds]],
) -> None:
    """What `SqliteStore.append` does, in a transaction of several statements."""
    with store._direct() as driver:
        driver.execute("BEGIN IMMEDIATE")
        leads, last, chain = driver.execute(_STANDING).fetchone()
        if leads != epoch:
            raise fenced(epoch)
        if rows and rows[0].seq != last + 1:
            raise out_of_step(rows[0].seq, last)
        for record in records_of(rows, epoch, chain):
            driver.execute(_ROW, record)
            last, chain = record[0], record[-1]
        for key, kept, at in answers:
            driver.execute(_ANSWER, answer_of(key, kept, at, last))
        driver.execute("UPDATE head SET seq = ?, chain = ?", Tail(last, chain))
        driver.execute("COMMIT")
    store._tell_of_rows(last)
