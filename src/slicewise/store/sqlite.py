"""The store in a SQLite file: one process, with one connection for everything.

SQLite 3.7.0 to 3.51.2 have the *WAL-reset defect*: when two connections to a database in WAL mode
write or checkpoint at the same time, a checkpoint may later skip committed pages. 3.51.3 fixed it,
and so did the patch releases 3.50.7 and 3.44.6. See https://sqlite.org/wal.html#walresetbug and
docs/storage.md. The journal mode is chosen by version.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from sqlalchemy import URL, Connection, NullPool, create_engine, literal_column
from sqlalchemy.exc import DBAPIError

from slicewise.control.ports import DamagedError, IdempotencyKey, Kept, StoreError
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Row, Seconds
from slicewise.lockfile import FileLock, InUseError
from slicewise.store import schema_version
from slicewise.store.records import Tail, answer_of, fenced, kept_of, out_of_step, records_of
from slicewise.store.schema_version import EmptyError
from slicewise.store.sql import SqlStore

DATABASE = "slicewise.db"
LOCK = "slicewise.lock"
CHECKPOINT_PAGES = 8_192
"""A checkpoint every 32 MiB of log, so that pages that change often are copied once."""
CACHE_KIB = 65_536
BUSY_SECONDS = 10.0
OLDEST = (3, 24, 0)
_ROWS_PER_STATEMENT = 90
"""SQLite before 3.32 takes 999 values in a statement, and a row has up to ten."""
_CACHED_STATEMENTS = 2 * _ROWS_PER_STATEMENT + 64
"""Statements that the driver keeps prepared: an insert for each number of rows, and the others."""

_log = logging.getLogger(__name__)

_WAL_SINCE = (3, 7, 0)
_FIXED = (3, 51, 3)
_PATCHED = ((3, 44, 6), (3, 50, 7))

Version = tuple[int, int, int]


class Mode(NamedTuple):
    """How a database is opened."""

    journal: str
    locking: str
    why: str


def has_wal_reset_defect(version: Version) -> bool:
    """Whether two connections in WAL mode can damage the database."""
    if not _WAL_SINCE <= version < _FIXED:
        return False
    return not any(version[:2] == fix[:2] and version >= fix for fix in _PATCHED)


def journal_mode(version: Version) -> Mode:
    """The fastest safe mode.

    A commit in WAL mode takes one sync of the disk; without WAL it takes four times as long. The
    defect needs a second connection, so affected versions get exclusive locking, which keeps the
    file locked while the connection is open.
    """
    name = ".".join(map(str, version))
    if version < _WAL_SINCE:
        return Mode("TRUNCATE", "NORMAL", f"SQLite {name} has no WAL mode")
    if has_wal_reset_defect(version):
        return Mode(
            "WAL",
            "EXCLUSIVE",
            f"SQLite {name} has the WAL-reset defect, so no other connection is allowed",
        )
    return Mode("WAL", "NORMAL", f"SQLite {name} has no WAL-reset defect: others may read along")


class SqliteStore(SqlStore):
    """A store in one file of a data folder, which no other process may use."""

    _now = literal_column("(julianday('now') - 2440587.5) * 86400.0")
    # Reads and commits share the connection: a read may take a few milliseconds at most.
    _scan_limit = 5_000

    def __init__(
        self,
        folder: Path,
        *,
        migrate: bool = True,
        begin: bool = True,
        immutable: bool = False,
        mode: Mode | None = None,
    ) -> None:
        """``migrate`` brings the tables to this version, ``begin`` creates them if there are none.

        An ``immutable`` database is only read: nothing is locked and no file is created.
        """
        version = sqlite3.sqlite_version_info
        if version < OLDEST:
            raise SlicewiseError(
                f"SQLite {sqlite3.sqlite_version} is too old, slicewise needs "
                f"{'.'.join(map(str, OLDEST))}: use a newer one, or PostgreSQL"
            )
        self.path = folder / DATABASE
        self._mode = mode or journal_mode(version[:3])
        self._lock = threading.RLock()
        self._arrived = threading.Condition()
        self._last_seq = 0
        self._led = False
        """Whether this process has been the leader."""
        self._closed = False
        self._connection: Connection | None = None
        self._engine = create_engine(
            _url(self.path, immutable),
            poolclass=NullPool,
            # This class begins and ends transactions itself.
            isolation_level="AUTOCOMMIT",
            connect_args={
                "check_same_thread": False,
                "timeout": BUSY_SECONDS,
                "cached_statements": _CACHED_STATEMENTS,
            },
        )
        if not (migrate and begin) and not self.path.exists():
            raise EmptyError(f"{str(folder)!r} holds no database {DATABASE}")
        self._immutable = immutable
        self._folder_lock = None if immutable else _lock(folder)
        try:
            self._prepare(migrate, begin)
        except BaseException:
            self._drop()
            self._unlock_folder()
            raise
        _log.info("%s: journal mode %s, %s", self.path, self._mode.journal, self._mode.why)

    def _prepare(self, migrate: bool, begin: bool) -> None:
        if not self.path.exists():
            # SQLite would create a file that others can read.
            try:
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except OSError as error:
                raise StoreError(
                    f"{str(self.path)!r} cannot be created: {error.strerror}"
                ) from None
        if not migrate:
            with self.session() as connection:
                schema_version.require_current(connection)
            return
        with self.transaction() as connection:
            schema_version.upgrade(connection, begin)
        self._last_seq = self.last_seq()

    # The connection

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """The connection, held by one thread at a time."""
        with self._lock:
            try:
                yield self._connect()
            except DBAPIError as error:
                self._recover(error)
                raise self._store_error(error) from error
            except (TypeError, ValueError) as error:
                # SQLite returns whatever the file holds, such as text that is not UTF-8.
                raise self._damaged(str(error)) from error

    @contextmanager
    def transaction(self, *, long: bool = False) -> Iterator[Connection]:
        """A write transaction on the connection."""
        with self.session() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                self._roll_back(connection)
                raise
            connection.exec_driver_sql("COMMIT")
            if long:
                self._announce_rows(_last_seq(connection))

    def _connect(self) -> Connection:
        if self._closed:
            raise StoreError("the store is closed")
        if self._connection is None:
            connection = self._engine.connect()
            try:
                for pragma in self._pragmas():
                    connection.exec_driver_sql(f"PRAGMA {pragma}")
            except BaseException:
                with suppress(DBAPIError):
                    connection.close()
                raise
            self._connection = connection
        return self._connection

    def _pragmas(self) -> tuple[str, ...]:
        if self._immutable:
            return ()
        return (
            # Locking first: a connection that starts exclusive creates no shared memory.
            f"locking_mode = {self._mode.locking}",
            f"journal_mode = {self._mode.journal}",
            "synchronous = FULL",
            "fullfsync = ON",
            "checkpoint_fullfsync = ON",
            f"cache_size = -{CACHE_KIB}",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
            f"journal_size_limit = {2 * CHECKPOINT_PAGES * 4096}",
            # A log that could not be synced may exist in memory only, even if later syncs
            # succeed. Copying it into the database writes all of it again.
            "wal_checkpoint(TRUNCATE)",
        )

    def _roll_back(self, connection: Connection) -> None:
        """Roll back; drop a connection that cannot."""
        try:
            if _driver(connection).in_transaction:
                connection.exec_driver_sql("ROLLBACK")
        except DBAPIError:
            self._drop()

    def _recover(self, error: DBAPIError) -> None:
        """Leave the connection usable after an error, or drop it: the next call opens another."""
        connection = self._connection
        if connection is not None:
            self._roll_back(connection)
        if _error_name(error).startswith(("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB")):
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError, sqlite3.Error):
                connection.close()

    def _store_error(self, error: DBAPIError) -> StoreError:
        name, text = _error_name(error), str(error.orig)
        path = str(self.path)
        if name == "SQLITE_FULL":
            return StoreError(f"the disk is full, {path!r} cannot grow: free some space")
        if name.startswith("SQLITE_BUSY"):
            return StoreError(f"another program has {path!r} open: stop it and try again")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return self._damaged(text)
        if name.startswith("SQLITE_CONSTRAINT"):
            return StoreError(f"the row already exists ({text}): read the journal again")
        return StoreError(f"the database {path!r} cannot be read or written: {text} ({name})")

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(
            f"the database {str(self.path)!r} is damaged ({why}): stop the service, run 'slicewise "
            "verify', and restore a backup into a new folder"
        )

    # Writing

    def append(
        self,
        epoch: int,
        rows: Sequence[Row],
        answers: Iterable[tuple[IdempotencyKey, Kept, Seconds]],
    ) -> None:
        """Commit rows and answers in one transaction."""
        before = self._current_tail()
        self._tail = None  # unknown until the commit has succeeded
        records = records_of(rows, epoch, before.chain)
        after = Tail(records[-1][0], records[-1][-1]) if records else before
        if records:
            before = before._replace(seq=records[0][0] - 1)
        kept_answers = [answer_of(key, kept, at, after.seq) for key, kept, at in answers]
        with self._direct() as driver:
            driver.execute("BEGIN IMMEDIATE")
            if not driver.execute(_MOVE_HEAD, (*after, *before, epoch)).rowcount:
                leads, ends = driver.execute(_HEAD).fetchone()
                raise fenced(epoch) if leads != epoch else out_of_step(before.seq + 1, ends)
            _insert(driver, _INSERT_ROWS, records)
            _insert(driver, _INSERT_ANSWERS, kept_answers)
            driver.execute("COMMIT")
        self._tail = after
        if rows:
            self._announce_rows(after.seq)

    @contextmanager
    def _direct(self) -> Iterator[sqlite3.Connection]:
        """The driver's own connection, for statements that every request waits for.

        A statement through SQLAlchemy costs ten times as much.
        """
        with self.session() as connection:
            try:
                yield _driver(connection)
            except sqlite3.Error as error:
                raise DBAPIError(None, None, error) from error
            except BaseException:
                self._roll_back(connection)
                raise

    def _announce_rows(self, last: int) -> None:
        with self._arrived:
            self._last_seq = last
            self._arrived.notify_all()

    def answers(self, keys: Sequence[IdempotencyKey]) -> dict[IdempotencyKey, Kept]:
        """The stored answers for these keys."""
        with self._direct() as driver:
            found = driver.execute(_ANSWERS, (msgspec.json.encode(keys).decode(),))
            return {IdempotencyKey(row[0], row[1]): kept_of(*row) for row in found}

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader unless a lease is held; the lock on the folder keeps others away."""
        with self.transaction() as connection:
            done = connection.exec_driver_sql(
                f"UPDATE leader SET epoch = epoch + 1, holder = ?, address = ?, "
                # An earlier leader has released the folder, whatever its lease says.
                f"until = {self._now} + ?, lease = ? WHERE ? OR NOT {self._lease_is_valid}",
                (holder, address, seconds, seconds, not self._led),
            )
            if not done.rowcount:
                return None
            self._led = True
            self._tail = None
            epoch: int = connection.exec_driver_sql("SELECT epoch FROM leader").scalar_one()
            return epoch

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows after ``after``; all rows are written through this object."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._closed or self._last_seq > after, seconds)
            return not self._closed and self._last_seq > after

    def damage(self) -> list[str]:
        """The problems that SQLite finds in the file."""
        try:
            with self.session() as connection:
                found = [
                    str(row) for (row,) in connection.exec_driver_sql("PRAGMA integrity_check")
                ]
        except StoreError as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        """Close the file and unlock the folder."""
        with self._lock:
            if self._closed:
                return
            with self._arrived:
                self._closed = True
                self._arrived.notify_all()
            self._drop()
            self._unlock_folder()

    def _unlock_folder(self) -> None:
        if self._folder_lock is not None:
            self._folder_lock.release()


def _url(path: Path, immutable: bool) -> URL:
    if not immutable:
        return URL.create("sqlite", database=str(path))
    options = {"mode": "ro", "immutable": "1", "uri": "true"}
    return URL.create("sqlite", database=f"file:{quote(str(path))}", query=options)


def _lock(folder: Path) -> FileLock:
    try:
        return FileLock(folder / LOCK)
    except InUseError as error:
        raise InUseError(
            f"{str(folder)!r} is in use: {error}, and only one process can use a data folder"
        ) from None
    except OSError as error:
        raise SlicewiseError(f"{str(folder / LOCK)!r} cannot be locked: {error.strerror}") from None


def _driver(connection: Connection) -> sqlite3.Connection:
    driver: Any = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    return driver


def _last_seq(connection: Connection) -> int:
    found = connection.exec_driver_sql("SELECT max(seq) FROM journal").scalar_one()
    return found or 0


def _error_name(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlite_errorname", ""))


_HEAD = "SELECT (SELECT epoch FROM leader), seq FROM head"
_MOVE_HEAD = (
    "UPDATE head SET seq = ?, chain = ? "
    "WHERE seq = ? AND chain = ? AND (SELECT epoch FROM leader) = ?"
)
_INSERT_ROWS = (
    "INSERT INTO journal (seq, at, epoch, actor, origin, kind, tenant, subject, data, chain) VALUES"
)
_INSERT_ANSWERS = (
    "INSERT INTO answers (tenant, key, digest, status, body, at, seq, checksum) VALUES"
)


def _insert(driver: sqlite3.Connection, insert: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, many by one statement.

    After each statement the driver waits for the interpreter's lock, which a busy event loop holds.
    """
    for start in range(0, len(rows), _ROWS_PER_STATEMENT):
        some = rows[start : start + _ROWS_PER_STATEMENT]
        driver.execute(
            _with_values(insert, len(some), len(some[0])), list(chain.from_iterable(some))
        )


@cache  # the driver looks up its prepared statements by this text
def _with_values(insert: str, rows: int, columns: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return f"{insert} {', '.join([row] * rows)}"


_ANSWERS = (
    "SELECT a.tenant, a.key, a.digest, a.status, a.body, a.at, a.seq, a.checksum "
    "FROM json_each(?) AS k "
    "CROSS JOIN answers AS a ON a.tenant = json_extract(k.value, '$[0]') "
    "AND a.key = json_extract(k.value, '$[1]')"
)
