"""The store in a SQLite file: one process, and in it one connection for everything."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from sqlalchemy import URL, Connection, NullPool, create_engine, literal_column
from sqlalchemy.exc import DBAPIError

from slicewise.control.entries import Row, Seconds
from slicewise.control.ports import DamagedError, Kept, Key, StoreError
from slicewise.core.errors import SlicewiseError
from slicewise.lockfile import FileLock, InUseError
from slicewise.store import migrating
from slicewise.store.migrating import EmptyError
from slicewise.store.one_statement import (
    FENCED,
    OUT_OF_STEP,
    STATEMENTS,
    Line,
    answer_line,
    moving,
    prepare,
    row_line,
    write,
)
from slicewise.store.records import Tail, fenced, kept_of, out_of_step, records_of
from slicewise.store.sql import SqlStore
from slicewise.store.sqlite_mode import Mode, journal_mode

DATABASE = "slicewise.db"
LOCK = "slicewise.lock"
CHECKPOINT_PAGES = 8_192
"""A checkpoint every 32 MiB of log: pages that change often are then copied once, not often."""
CACHE_KIB = 65_536
BUSY_SECONDS = 10.0
OLDEST = (3, 24, 0)

_log = logging.getLogger(__name__)


class SqliteStore(SqlStore):
    """Keeps everything in one file of a data folder, which it has for itself."""

    _now = literal_column("(julianday('now') - 2440587.5) * 86400.0")
    # Reads and commits share the connection, so no read may be long: a few milliseconds.
    _stretch = 5_000

    def __init__(
        self,
        folder: Path,
        *,
        migrate: bool = True,
        begin: bool = True,
        immutable: bool = False,
        mode: Mode | None = None,
    ) -> None:
        """``migrate`` brings the tables to this version, ``begin`` makes them if there are none.

        What is ``immutable`` cannot be written to: nothing is locked, and no file is made.
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
        """Whether this process has ever led."""
        self._closed = False
        self.along = ExitStack()
        """What is closed along with the store."""
        self._connection: Connection | None = None
        self._prepared: sqlite3.Connection | None = None
        """The connection that can commit by one statement."""
        self._engine = create_engine(
            _url(self.path, immutable),
            poolclass=NullPool,
            # Transactions are begun and ended here, in so many words, and by nobody else.
            isolation_level="AUTOCOMMIT",
            connect_args={
                "check_same_thread": False,
                "timeout": BUSY_SECONDS,
                "cached_statements": STATEMENTS,
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
            self._let_folder_go()
            raise
        _log.info("%s: journal mode %s, %s", self.path, self._mode.journal, self._mode.why)

    def _prepare(self, migrate: bool, begin: bool) -> None:
        if not self.path.exists():
            # Made here, because SQLite would let others read it.
            try:
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except OSError as error:
                raise StoreError(f"{str(self.path)!r} cannot be made: {error.strerror}") from None
        if not migrate:
            with self.session() as connection:
                migrating.require_current(connection)
            return
        with self.transaction() as connection:
            migrating.upgrade(connection, begin)
        self._last_seq = self.last_seq()

    # The connection

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """The connection, for whoever's turn it is."""
        with self._lock:
            try:
                yield self._connect()
            except DBAPIError as error:
                self._after(error)
                raise self._trouble(error) from error
            except (TypeError, ValueError) as error:
                # SQLite hands out whatever stands in the file: text that is none, say.
                raise self._damaged(str(error)) from error

    @contextmanager
    def transaction(self, *, long: bool = False) -> Iterator[Connection]:
        """A transaction on the connection; it can write from the beginning."""
        with self.session() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                self._roll_back(connection)
                raise
            connection.exec_driver_sql("COMMIT")
            if long:
                self._tell_of_rows(_last_seq(connection))

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
            # Locking first: a connection that begins exclusive makes no shared memory.
            f"locking_mode = {self._mode.locking}",
            f"journal_mode = {self._mode.journal}",
            "synchronous = FULL",
            "fullfsync = ON",
            "checkpoint_fullfsync = ON",
            f"cache_size = -{CACHE_KIB}",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
            f"journal_size_limit = {2 * CHECKPOINT_PAGES * 4096}",
            # A log that was written and could not be synced may be in memory only, though later
            # syncs succeed. Copying it into the database writes all of it again.
            "wal_checkpoint(TRUNCATE)",
        )

    def _roll_back(self, connection: Connection) -> None:
        """Undo a transaction; a connection that cannot even do that is dropped."""
        try:
            if _driver(connection).in_transaction:
                connection.exec_driver_sql("ROLLBACK")
        except DBAPIError:
            self._drop()

    def _after(self, error: DBAPIError) -> None:
        """Leave the connection usable after an error; the next call opens another if need be."""
        connection = self._connection
        if connection is not None:
            self._roll_back(connection)
        if _name_of(error).startswith(("SQLITE_IOERR", "SQLITE_CORRUPT", "SQLITE_NOTADB")):
            self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(DBAPIError, sqlite3.Error):
                connection.close()

    def _trouble(self, error: DBAPIError) -> StoreError:
        name, text = _name_of(error), str(error.orig)
        path = str(self.path)
        if name == "SQLITE_FULL":
            return StoreError(f"the disk is full, {path!r} cannot grow: free some space")
        if name.startswith("SQLITE_BUSY"):
            return StoreError(f"another program has {path!r} open: end it, and try again")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return self._damaged(text)
        if name.startswith("SQLITE_CONSTRAINT"):
            return StoreError(f"what was to be written is there already ({text}): read it again")
        return StoreError(f"the database {path!r} cannot be read or written: {text} ({name})")

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(
            f"the database {str(self.path)!r} is damaged ({why}): stop the service, run 'slicewise "
            "verify', and restore a backup into a new folder"
        )

    # Writing

    def append(
        self, epoch: int, rows: Sequence[Row], answers: Iterable[tuple[Key, Kept, Seconds]]
    ) -> None:
        """Make rows and answers durable together."""
        before = self._tail_now()
        self._tail = None  # until it is known to have been written
        records = records_of(rows, epoch, before.chain)
        after = Tail(records[-1][0], records[-1][-1]) if records else before
        if records:
            before = before._replace(seq=records[0][0] - 1)
        lines: list[Line] = [moving(epoch, before, after), *map(row_line, records)]
        lines += [answer_line(key, kept, at, after.seq) for key, kept, at in answers]
        self._write(epoch, before.seq + 1, lines)
        self._tail = after
        if rows:
            self._tell_of_rows(after.seq)

    def _write(self, epoch: int, first: int, lines: Sequence[Line]) -> None:
        with self._direct() as driver:
            if self._prepared is not driver:
                prepare(driver)
                self._prepared = driver
            try:
                write(driver, lines)
            except sqlite3.IntegrityError as error:
                if str(error) == FENCED:
                    raise fenced(epoch) from None
                if str(error) == OUT_OF_STEP:
                    ends = driver.execute("SELECT seq FROM head").fetchone()[0]
                    raise out_of_step(first, ends) from None
                raise

    @contextmanager
    def _direct(self) -> Iterator[sqlite3.Connection]:
        """The driver's own connection, for what every request has to wait for.

        A statement by way of SQLAlchemy costs ten times as much as the same statement here.
        """
        with self.session() as connection:
            try:
                yield _driver(connection)
            except sqlite3.Error as error:
                raise DBAPIError(None, None, error) from error
            except BaseException:
                self._roll_back(connection)
                raise

    def _tell_of_rows(self, last: int) -> None:
        with self._arrived:
            self._last_seq = last
            self._arrived.notify_all()

    def answers(self, keys: Sequence[Key]) -> dict[Key, Kept]:
        """The answers given for these keys."""
        with self._direct() as driver:
            found = driver.execute(_ANSWERS, (msgspec.json.encode(keys).decode(),))
            return {Key(row[0], row[1]): kept_of(*row) for row in found}

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader, if nobody's lease runs; the lock on the folder keeps others away."""
        with self.transaction() as connection:
            done = connection.exec_driver_sql(
                f"UPDATE leader SET epoch = epoch + 1, holder = ?, address = ?, "
                # A leader from before this store was opened would hold the lock on the folder.
                f"until = {self._now} + ?, lease = ? WHERE ? OR NOT {self._runs}",
                (holder, address, seconds, seconds, not self._led),
            )
            if not done.rowcount:
                return None
            self._led = True
            self._tail = None
            epoch: int = connection.exec_driver_sql("SELECT epoch FROM leader").scalar_one()
            return epoch

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows behind ``after``; all rows come through this object."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._closed or self._last_seq > after, seconds)
            return not self._closed and self._last_seq > after

    def damage(self) -> list[str]:
        """What SQLite finds wrong with the file."""
        try:
            with self.session() as connection:
                found = [
                    str(row) for (row,) in connection.exec_driver_sql("PRAGMA integrity_check")
                ]
        except StoreError as error:
            return [str(error)]
        return [] if found == ["ok"] else found

    def close(self) -> None:
        """Let go of the file and the folder."""
        self.along.close()
        with self._lock:
            if self._closed:
                return
            with self._arrived:
                self._closed = True
                self._arrived.notify_all()
            self._drop()
            self._let_folder_go()

    def _let_folder_go(self) -> None:
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
            f"{str(folder)!r} is in use: {error}, and one process at a time may serve from a "
            "data folder"
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


def _name_of(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlite_errorname", ""))


_ANSWERS = (
    "SELECT a.tenant, a.key, a.digest, a.status, a.body, a.at, a.seq, a.checksum "
    "FROM json_each(?) AS k "
    "CROSS JOIN answers AS a ON a.tenant = json_extract(k.value, '$[0]') "
    "AND a.key = json_extract(k.value, '$[1]')"
)
