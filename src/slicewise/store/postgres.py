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

from slicewise.control.entries import Row, Seconds
from slicewise.control.ports import Kept, Key, StoreError
from slicewise.core.errors import SlicewiseError
from slicewise.store import migrating
from slicewise.store.patience import Line, Patience
from slicewise.store.records import (
    Tail,
    answer_of,
    fenced,
    kept_of,
    out_of_step,
    records_of,
)
from slicewise.store.sql import SqlStore

CALL_SECONDS = 10.0
"""How long a call may take before it is given up."""
CONNECT_SECONDS = 5
MIGRATION_LOCK = 0x736C696365
"""Whoever changes the tables holds the advisory lock of this number."""
CHANNEL = "slicewise_journal"

TURN_SECONDS = 0.5

_DRIVER = "postgresql+psycopg"
_log = logging.getLogger(__name__)


class PostgresStore(SqlStore):
    """Keeps everything in a database; its clock decides whose lease runs."""

    _now = literal_column("extract(epoch FROM clock_timestamp())::float8")

    def __init__(
        self,
        url: str,
        *,
        migrate: bool = True,
        begin: bool = True,
        call_seconds: float = CALL_SECONDS,
    ) -> None:
        """``migrate`` brings the tables to this version, ``begin`` makes them if there are none."""
        self._call_seconds = call_seconds
        self._closed = False
        self._patience = Patience()
        self._listening = threading.Lock()
        self._listener: psycopg.Connection[Any] | None = None
        parsed = self._url = database_url(url)
        self.where = parsed.set(drivername="postgresql").render_as_string(hide_password=True)
        self._engine = create_engine(
            parsed,
            # One statement is one transaction, and one journey to the server.
            isolation_level="AUTOCOMMIT",
            use_native_hstore=False,
            pool_size=4,
            max_overflow=8,
            pool_timeout=call_seconds,
            connect_args=_connect_arguments(parsed, call_seconds),
        )
        # By connection, since it must be at hand without asking the connection anything.
        self._lines: dict[int, Line] = {}
        event.listen(self._engine, "connect", self._set_up)
        event.listen(self._engine, "close", self._let_go)
        try:
            self._prepare(migrate, begin)
        except BaseException:
            self.close()
            raise

    def _set_up(self, driver: psycopg.Connection[Any], record: object = None) -> None:
        line = self._lines[id(driver)] = Line(driver.fileno())
        limit = int(self._call_seconds * 1000)
        try:
            with self._patience.for_at_most(self._call_seconds, line):
                driver.execute(
                    # The server ends what nobody waits for any more, and lets go of its locks.
                    f"SET statement_timeout = {limit}; "
                    f"SET idle_in_transaction_session_timeout = {limit}; "
                    # What is acknowledged must be on disk, whatever the server does for others.
                    "SELECT set_config('synchronous_commit', 'on', false) "
                    "WHERE current_setting('synchronous_commit') = 'off'".encode()
                )
        except BaseException:
            self._let_go(driver)
            driver.close()
            raise

    def _let_go(self, driver: psycopg.Connection[Any], record: object = None) -> None:
        line = self._lines.pop(id(driver), None)
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
            # Of several processes that start at once, one makes the tables and the others wait.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (MIGRATION_LOCK,))
            migrating.upgrade(connection, begin)

    # Connections

    @contextmanager
    def session(self) -> Iterator[Connection]:
        """A connection of the pool, for a call that may take only so long."""
        with (
            self._trouble(),
            self._connected() as connection,
            self._limited(_driver(connection)),
        ):
            yield connection

    @contextmanager
    def transaction(self, *, long: bool = False) -> Iterator[Connection]:
        """A transaction; a long one may take any time."""
        with self._trouble(), ExitStack() as stack:
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
                if self._closed:  # meanwhile, and there is no pool to go back to
                    connection.invalidate()

    @contextmanager
    def _limited(self, driver: psycopg.Connection[Any]) -> Iterator[None]:
        # A little longer than the server itself waits, whose answer says more.
        with self._patience.for_at_most(self._call_seconds + 1, self._lines[id(driver)]):
            yield

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        """Say what is wrong in one sentence, without the statement and what was in it."""
        if self._closed:
            raise StoreError("the store is closed")
        try:
            yield
        except DBAPIError as error:
            raise self._sentence(error.orig) from error
        except psycopg.Error as error:
            raise self._sentence(error) from error
        except SQLAlchemyError as error:  # no connection came free, say
            raise StoreError(f"the database {self.where} cannot be used: {error}") from error
        except OSError as error:  # too many files are open, say
            raise StoreError(
                f"the database {self.where} cannot be reached: {error.strerror}"
            ) from error

    def _sentence(self, error: BaseException | None) -> StoreError:
        lines = str(error).strip().splitlines() or ["no reason given"]
        if isinstance(error, psycopg.errors.UniqueViolation):
            return StoreError(
                f"what was to be written is there already ({lines[0]}): read it again"
            )
        if isinstance(error, psycopg.errors.QueryCanceled):
            return StoreError(
                f"the database {self.where} took longer than {self._call_seconds:g} seconds"
            )
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StoreError(f"the database {self.where} cannot be reached: {lines[0]}")
        return StoreError(f"the database {self.where} refused: {lines[0]}")

    # Writing

    def append(
        self, epoch: int, rows: Sequence[Row], answers: Iterable[tuple[Key, Kept, Seconds]]
    ) -> None:
        """Make rows and answers durable together.

        It is one statement, so no pause of this process can fall between looking at the epoch and
        writing: the server does both, or neither. The row of the leader stays locked until the
        commit, so nobody takes over in between.
        """
        before = self._tail_now()
        self._tail = None  # until it is known to have been written
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

    def answers(self, keys: Sequence[Key]) -> dict[Key, Kept]:
        """The answers given for these keys."""
        with self.session() as connection:
            found = connection.exec_driver_sql(
                _ANSWERS, ([key.tenant for key in keys], [key.key for key in keys])
            ).all()
        return {Key(row[0], row[1]): kept_of(*row) for row in found}

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader, if nobody's lease runs by the database's clock."""
        with self.session() as connection:
            epoch: int | None = connection.exec_driver_sql(
                f"UPDATE leader SET epoch = epoch + 1, holder = %s, address = %s, "
                f"until = {self._now} + %s, lease = %s WHERE NOT {self._runs} RETURNING epoch",
                (holder, address, seconds, seconds),
            ).scalar()
        self._tail = None
        return epoch

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows behind ``after``; whoever appends them sends a note."""
        give_up = time.monotonic() + seconds
        with self._listening:
            try:
                with self._trouble():
                    while not self._has_rows(after):
                        if not self._note_comes(give_up):
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

    def _note_comes(self, give_up: float) -> bool:
        """Wait for a note; in short turns, so that a store that is closed is noticed."""
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
            self._let_go(listener)
            listener.close()

    def close(self) -> None:
        """Close every connection."""
        self._closed = True
        with self._listening:
            self._stop_listening()
        self._engine.dispose()
        self._patience.close()


def database_url(url: str) -> URL:
    """The URL of a database as the driver understands it."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The text may hold a password, so it is not repeated.
        raise SlicewiseError(
            "database is not a URL such as postgresql://user@host:5432/name"
        ) from None
    if parsed.drivername not in ("postgresql", "postgres", _DRIVER):
        raise SlicewiseError(
            f"database must be a URL that begins with postgresql://, not {parsed.drivername}:// "
            "(SQLite needs none, it lives in the data folder)"
        )
    return parsed.set(drivername=_DRIVER)


def _connect_arguments(url: URL, call_seconds: float) -> dict[str, object]:
    """What is asked of every connection, unless the URL says otherwise."""
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


# %b sends a column as a binary array, in a fifth of the time that text arrays take.
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
