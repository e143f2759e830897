"""The PostgreSQL store: lost connections, stopped servers, invalid URLs."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.postgres import PostgresServer, the_server
from tests.store.busy import START, fill
from tests.tenants import ref

from slicewise.control.ports import StoreError
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Row, TenantSet
from slicewise.store.postgres import PostgresStore, database_url
from slicewise.store.verification import verify
from slicewise.store.watchdog import Socket, Watchdog


def row(seq: int) -> Row:
    return Row(seq, START, "me", TenantSet(ref(f"t{seq}")))


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.database()


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    store = PostgresStore(url)
    yield store
    store.close()


def cut_connections(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )


def until_it_works(call: object) -> object:
    """Retry as the commit loop does, and return the result."""
    while True:
        try:
            return call()  # type: ignore[operator]
        except StoreError:
            pass


def test_a_lost_connection_fails_one_call(store: PostgresStore, url: str) -> None:
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    store.append(epoch, [row(1)], [])
    cut_connections(url)
    with pytest.raises(StoreError, match="cannot be reached"):
        store.append(epoch, [row(2)], [])
    assert store.rows(0, 10) == [row(1)]
    store.append(epoch, [row(2)], [])
    assert store.rows(0, 10) == [row(1), row(2)]


def test_waiting_for_rows_reconnects(store: PostgresStore, url: str) -> None:
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    assert not store.wait_for_rows(0, 0.01)
    cut_connections(url)
    with pytest.raises(StoreError):
        store.wait_for_rows(0, 60)
    until_it_works(lambda: store.append(epoch, [row(1)], []))
    assert store.wait_for_rows(0, 60)


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server of this test only, which it may stop."""
    server = PostgresServer(the_server().programs)
    server.start()
    yield server
    server.destroy()


def test_too_many_open_files_are_a_transient_error(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> Socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as crowded:
        crowded.setattr("slicewise.store.postgres.Socket", full)
        with pytest.raises(StoreError, match="Too many open files"):
            store.wait_for_rows(0, 0)
    assert not store.wait_for_rows(0, 0)


def test_a_restart_of_the_server(own_server: PostgresServer) -> None:
    store = PostgresStore(own_server.database())
    busy = fill(store)
    own_server.stop()
    with pytest.raises(StoreError, match="cannot be reached"):
        store.rows(0, 10)
    with pytest.raises(StoreError, match="cannot be reached"):
        store.last_seq()
    own_server.start()
    assert until_it_works(lambda: store.rows(0, 10_000)) == busy.office.rows
    assert verify(store).findings == []
    store.close()


def test_a_call_to_a_hanging_server_times_out(own_server: PostgresServer) -> None:
    store = PostgresStore(own_server.database(), call_seconds=0.3)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    store.append(epoch, [row(1)], [])
    assert not store.wait_for_rows(1, 0.01)
    with own_server.paused():
        for call in (
            lambda: store.append(epoch, [row(2)], []),
            lambda: store.renew(epoch, 10, 0),
            lambda: store.wait_for_rows(1, 0.01),
        ):
            with pytest.raises(StoreError, match="cannot be reached"):
                call()
    # The server may have got the row before it stopped, and write it now.
    seq = until_it_works(store.last_seq)
    assert seq in (1, 2)
    until_it_works(lambda: store.append(epoch, [row(store.last_seq() + 1)], []))
    assert verify(store).findings == []
    store.close()


def test_a_call_that_waits_for_a_lock_times_out(url: str) -> None:
    store = PostgresStore(url, call_seconds=0.2)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    with psycopg.connect(url) as connection:
        connection.execute("LOCK TABLE journal IN SHARE MODE")
        with pytest.raises(StoreError, match=r"longer than 0\.2 seconds"):
            store.append(epoch, [row(1)], [])
    store.append(epoch, [row(1)], [])
    store.close()


def test_the_settings_of_a_connection(store: PostgresStore) -> None:
    with store.session() as connection:

        def setting(name: str) -> object:
            return connection.exec_driver_sql(f"SHOW {name}").scalar()

        assert setting("statement_timeout") == "10s"
        assert setting("idle_in_transaction_session_timeout") == "10s"
        assert setting("application_name") == "slicewise"
        assert setting("synchronous_commit") == "on"


def test_commits_are_synchronous_whatever_the_default_of_the_server(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        name = url.rpartition("/")[2]
        connection.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
    store = PostgresStore(url)
    with store.session() as connection_:
        assert connection_.exec_driver_sql("SHOW synchronous_commit").scalar() == "on"
    store.close()


def test_a_server_without_fsync_is_logged(
    server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    PostgresStore(server.database()).close()
    assert "fsync = off" in caplog.text


def test_an_unreachable_server() -> None:
    with socket.socket() as probe:  # bound and not listening: no answer
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(StoreError, match="cannot be reached") as caught:
            PostgresStore(f"postgresql://me:secret@127.0.0.1:{port}/none")
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_database(server: PostgresServer) -> None:
    url = server.database()
    with pytest.raises(StoreError, match='database "unknown" does not exist'):
        PostgresStore(url.rpartition("/")[0] + "/unknown")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://host/name", "must be a URL that begins with postgresql://, not mysql"),
        ("sqlite:///file", "SQLite needs none"),
        ("postgresql+asyncpg://host/name", "not postgresql.asyncpg"),
        ("no url", "not a URL such as"),
        ("", "not a URL such as"),
    ],
)
def test_invalid_urls(url: str, problem: str) -> None:
    with pytest.raises(SlicewiseError, match=problem):
        database_url(url)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_valid_urls(scheme: str) -> None:
    url = database_url(f"{scheme}://me:secret@host:1/name?sslmode=require")
    assert url.render_as_string(hide_password=False) == (
        "postgresql+psycopg://me:secret@host:1/name?sslmode=require"
    )


def test_connections_are_not_leaked(url: str, tmp_path: Path) -> None:
    descriptors = Path("/proc/self/fd")
    PostgresStore(url).close()
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        store = PostgresStore(url)
        store.wait_for_rows(0, 0)
        cut_connections(url)
        with pytest.raises(StoreError):
            store.last_seq()
        store.last_seq()
        store.close()
    assert len(list(descriptors.iterdir())) == before


def test_a_store_can_be_closed_while_it_is_used(url: str) -> None:
    store = PostgresStore(url)
    problems: list[object] = []

    def use() -> None:
        try:
            while True:
                store.last_seq()
        except StoreError as error:
            problems.append(str(error))

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    store.wait_for_rows(0, 0.05)
    store.close()
    for user in users:
        user.join()
    assert problems == ["the store is closed"] * 4


# Watchdog


def test_a_call_past_its_deadline_fails() -> None:
    watchdog = Watchdog()
    here, there = socket.socketpair()
    line = Socket(here.fileno())
    with watchdog.limit(0.01, line):
        assert here.recv(1) == b""  # would wait for ever
    line.close()
    here.close()
    there.close()
    watchdog.close()


def test_a_call_within_its_deadline_is_left_alone() -> None:
    watchdog = Watchdog()
    pairs = [socket.socketpair() for _ in range(8)]
    lines = [Socket(here.fileno()) for here, _ in pairs]

    def use(number: int) -> None:
        here, there = pairs[number]
        for _ in range(200):
            with watchdog.limit(60, lines[number]):
                there.send(b"x")
                assert here.recv(1) == b"x"

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    with watchdog.limit(0.01, lines[0]):
        pass
    for thread in threads:
        thread.join()
    watchdog.close()
    for line, (here, there) in zip(lines, pairs, strict=True):
        there.send(b"y")
        assert here.recv(1) == b"y"
        line.close()
        here.close()
        there.close()
