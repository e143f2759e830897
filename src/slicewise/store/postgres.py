"""The store in a PostgreSQL database: any number of processes, of which one leads."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, create_engine, event, literal_column
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from slicewise.control.ports import IdempotencyKey, Kept, StoreError
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Row, Seconds
from slicewise.store import schema_version as migrating
from slicewise.store.records import (
    Tail,
    answer_of,
    fenced,
    kept_of,
    out_of_step,
    records_of,
)
from slicewise.store.sql import SqlStore
from slicewise.store.watchdog import Socket, Watchdog

CALL_SECONDS = 10.0
"""The time limit of a call."""
CONNECT_SECONDS = 5
MIGRATION_LOCK = 0x736C696365
"""The advisory lock that is held while tables are migrated."""
CHANNEL = "slicewise_journal"

TURN_SECONDS = 0.5

_DRIVER = "postgresql+psycopg"
_log = logging.getLogger(__name__)


class PostgresStore(SqlStore):
    """A store in a PostgreSQL database; the database's clock decides whether a lease is valid."""

    _now = literal_column("extract(epoch FROM clock_timestamp())::float8")

    def __init__(
        self,
        url: str,
        *,
        migrate: bool = True,
        begin: bool = True,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        """``migrate`` migrates the tables, ``begin`` creates them if there are none."""
        self._call_seconds = call_seconds
        self._closed = False
        self._watchdog = Watchdog()
        self._listening = threading.Lock()
        self._listener: psycopg.Connection[Any] | None = None
        parsed = self._url = database_url(url)
        self.where = parsed.set(drivername="postgresql").render_as_string(hide_password=True)
        self._engine = create_engine(
            parsed,
            # One statement is one transaction and one round trip.
            isolation_level="AUTOCOMMIT",
            use_native_hstore=False,
            pool_size=4,
            max_overflow=8,
            pool_timeout=call_seconds,
            connect_args=_connect_arguments(parsed, call_seconds),
        )
        # By id of the connection, so that a lookup needs no call to the connection.
        self._sockets: dict[int, Socket] = {}
        event.listen(self._engine, "connect", self._set_up)
        event.listen(self._engine, "close", self._forget_socket)
        try:
            self._prepare(migrate, begin)
        except BaseException:
            self.close()
            raise

    def _set_up(self, driver: psycopg.Connection[Any], record: object = None) -> None:
        line = self._sockets[id(driver)] = Socket(driver.fileno())
        limit = int(self._call_seconds * 1000)
        try:
            with self._watchdog.limit(self._call_seconds, line):
                driver.execute(
                    # The server ends abandoned statements and releases their locks.
                    f"SET statement_timeout = {limit}; "
                    f"SET idle_in_transaction_session_timeout = {limit}; "
                    # A commit must be on disk, whatever the server's default is.
                    "SELECT set_config('synchronous_commit', 'on', false) "
                    "WHERE current_setting('synchronous_commit') = 'off'".encode()
                )
        except BaseException:
            self._forget_socket(driver)
            driver.close()
            raise

    def _forget_socket(self, driver: psycopg.Connection[Any], record: object = None) -> None:
        line = self._sockets.pop(id(driver), None)
        if line is not None:
            line.close()

    def _prepare(self, migrate: bool, begin: bool) -> None:
        with self.session() as connection:
            if connection.exec_driver_sql("SHOW fsync").scalar_one() != "on":
                _log.warning("%s runs with fsync = off: a power failure loses data", self.where)
            if not migrate:
                migrating.require_current(connection)
                return
            if migrating.revision(connection) == migrating.HEAD:
                return
        with self.transaction(long=True) as connection:
            # If several processes start at once, one creates the tables and the others wait.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
            migrating.upgrade(connection, begin)

    # Connections

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """A connection of the pool, for a call with a time limit."""
        with (
            self._store_errors(),
            self._connected() as connection,
            self._limited(_driver(connection)),
        ):
            yield connection

    @contextmanager
    def transaction(self, *, long: bool = False) -> Iterator[Connection]:
        """A transaction; a long one has no time limit."""
        with self._store_errors(), ExitStack() as stack:
            connection = stack.enter_context(self._connected())
            connection = connection.execution_options(isolation_level="READ COMMITTED")
            if not long:
                stack.enter_context(self._limited(_driver(connection)))
            stack.enter_context(connection.begin())
            if long:
                connection.exec_driver_sql(
                    "SET LOCAL statement_timeout = 0; "
                    "SET LOCAL idle_in_transaction_session_timeout = 0"
                )
            yield connection

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            try:
                yield connection
            finally:
                if self._closed:  # the pool is gone
                    connection.invalidate()

    @contextmanager
    def _limited(self, driver: psycopg.Connection[Any]) -> Iterator[None]:
        # Longer than the server's own limit, which has the better error message.
        with self._watchdog.limit(self._call_seconds + 1, self._sockets[id(driver)]):
            yield

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Turn errors into one-line StoreErrors, without the statement and its values."""
        if self._closed:
            raise StoreError("the store is closed")
        try:
            yield
        except DBAPIError as error:
            raise self._store_error(error.orig) from error
        except psycopg.Error as error:
            raise self._store_error(error) from error
        except SQLAlchemyError as error:  # such as a pool timeout
            raise StoreError(f"the database {self.where} cannot be used: {error}") from error
        except OSError as error:  # such as too many open files
            raise StoreError(
                f"the database {self.where} cannot be reached: {error.strerror}"
            ) from error

    def _store_error(self, error: BaseException | None) -> StoreError:
        lines = str(error).strip().splitlines() or ["no reason given"]
        if isinstance(error, psycopg.errors.UniqueViolation):
            return StoreError(f"the row already exists ({lines[0]}): read the journal again")
        if isinstance(error, psycopg.errors.QueryCanceled):
            return StoreError(
                f"the database {self.where} took longer than {self._call_seconds:g} seconds"
            )
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StoreError(f"the database {self.where} cannot be reached: {lines[0]}")
        return StoreError(f"the database {self.where} refused: {lines[0]}")

    # Writing

    def append(
        self,
        epoch: int,
        rows: Sequence[Row],
        answers: Iterable[tuple[IdempotencyKey, Kept, Seconds]],
    ) -> None:
        """Commit rows and answers in one transaction.

        It is one statement, so this process cannot be paused between the check of the epoch and
        the write. The leader's row stays locked until the commit, so no other process can take
        over in between.
        """
        before = self._current_tail()
        self._tail = None  # unknown until the commit has succeeded
        records = records_of(rows, epoch, before.chain)
        after = Tail(records[-1][0], records[-1][-1]) if records else before
        first = records[0][0] if records else before.seq + 1
        seqs, times, _, *texts, chains = _columns(records, 10)
        kept = _columns([answer_of(key, kept, at, after.seq) for key, kept, at in answers], 8)
        ends = (*after, first - 1, before.chain)
        with self.session() as connection:
            done = connection.exec_driver_sql(
                _APPEND,
                (epoch, *ends, seqs, times, *texts, chains, *kept, CHANNEL, after.seq),
            ).all()
            if done:
                self._tail = after
                return
            found = connection.exec_driver_sql(
                "SELECT epoch, (SELECT seq FROM head) FROM leader"
            ).one()
        raise fenced(epoch) if found[0] != epoch else out_of_step(first, found[1])

    def answers(self, keys: Sequence[IdempotencyKey]) -> dict[IdempotencyKey, Kept]:
        """The stored answers for these keys."""
        with self.session() as connection:
            found = connection.exec_driver_sql(
                _ANSWERS, ([key.tenant for key in keys], [key.key for key in keys])
            ).all()
        return {IdempotencyKey(row[0], row[1]): kept_of(*row) for row in found}

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader unless a lease is valid by the database's clock."""
        with self.session() as connection:
            epoch: int | None = connection.exec_driver_sql(
                f"UPDATE leader SET epoch = epoch + 1, holder = %s, address = %s, "
                f"until = {self._now} + %s, lease = %s WHERE NOT {self._lease_is_valid} "
                "RETURNING epoch",
                (holder, address, seconds, seconds),
            ).scalar()
        self._tail = None
        return epoch

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows after ``after``; every append sends a notification."""
        give_up = time.monotonic() + seconds
        with self._listening:
            try:
                with self._store_errors():
                    while not self._has_rows(after):
                        if not self._wait_for_notification(give_up):
                            return not self._closed and self._has_rows(after)
                    return True
            except StoreError:
                self._stop_listening()
                if not self._closed:
                    raise
                return False

    def _has_rows(self, after: int) -> bool:
        listener = self._listen()
        with self._limited(listener):
            found = listener.execute("SELECT max(seq) FROM journal").fetchone()
        return found is not None and (found[0] or 0) > after

    def _wait_for_notification(self, give_up: float) -> bool:
        """Wait for a notification, in short turns, so that `close` is noticed."""
        listener = self._listen()
        while not self._closed and (left := give_up - time.monotonic()) > 0:
            for _ in listener.notifies(timeout=min(left, TURN_SECONDS), stop_after=1):
                return True
        return False

    def _listen(self) -> psycopg.Connection[Any]:
        if self._listener is None:
            arguments, options = self._engine.dialect.create_connect_args(self._url)
            limits: dict[str, Any] = _connect_arguments(self._url, self._call_seconds)
            listener = psycopg.connect(*arguments, **{**options, **limits}, autocommit=True)
            self._listener = listener
            self._set_up(listener)
            with self._limited(listener):
                listener.execute(f"LISTEN {CHANNEL}".encode())
        return self._listener

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._forget_socket(listener)
            listener.close()

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        with self._listening:
            self._stop_listening()
        self._engine.dispose()
        self._watchdog.close()


def database_url(url: str) -> URL:
    """Parse the URL of a database for the driver."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The text may contain a password: do not repeat it.
        raise SlicewiseError(
            "database is not a URL such as postgresql://user@host:5432/name"
        ) from None
    if parsed.drivername not in ("postgresql", "postgres", _DRIVER):
        raise SlicewiseError(
            f"database must be a URL that begins with postgresql://, not {parsed.drivername}:// "
            "(SQLite needs none: its file is in the data folder)"
        )
    return parsed.set(drivername=_DRIVER)


def _connect_arguments(url: URL, call_seconds: float) -> dict[str, object]:
    """Options of every connection; those in the URL take precedence."""
    limit = int(call_seconds * 1000)
    arguments: dict[str, object] = {
        "application_name": "slicewise",
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": limit,
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }
    return {name: value for name, value in arguments.items() if name not in url.query}


def _driver(connection: Connection) -> psycopg.Connection[Any]:
    driver = connection.connection.dbapi_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]


# %b sends a column as a binary array, which takes a fifth of the time of a text array.
_APPEND = """
WITH led AS (
    SELECT epoch FROM leader WHERE epoch = %s FOR SHARE
), fence AS (
    UPDATE head SET seq = %s, chain = %s FROM led
    WHERE head.seq = %s AND head.chain = %s
    RETURNING led.epoch
), written AS (
    INSERT INTO journal (seq, at, epoch, actor, origin, kind, tenant, subject, data, chain)
    SELECT r.seq, r.at, fence.epoch, r.actor, r.origin, r.kind, r.tenant, r.subject, r.data, r.chain
    FROM fence, unnest(
        %b::bigint[], %b::float8[], %b::text[], %b::text[], %b::text[], %b::text[], %b::text[],
        %b::text[], %b::bytea[]
    ) AS r (seq, at, actor, origin, kind, tenant, subject, data, chain)
), answered AS (
    INSERT INTO answers (tenant, key, digest, status, body, at, seq, checksum)
    SELECT a.*
    FROM fence, unnest(
        %b::text[], %b::text[], %b::text[], %b::smallint[], %b::bytea[], %b::float8[],
        %b::bigint[], %b::bytea[]
    ) AS a
)
SELECT pg_notify(%s, %s::text) FROM fence
"""
_ANSWERS = """
SELECT a.tenant, a.key, a.digest, a.status, a.body, a.at, a.seq, a.checksum
FROM unnest(%b::text[], %b::text[]) AS k (tenant, key)
JOIN answers AS a ON a.tenant = k.tenant AND a.key = k.key
"""
