"""A full disk, a failing disk, a lost database: clear errors, and recovery without a restart.

Clients keep calling throughout. Only the broken component is repaired.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import psycopg
import pytest
from scripts.test_services import require_postgres
from tests.e2e.conftest import Open, Tell
from tests.e2e.load import Behavior
from tests.e2e.scenario import Scenario, run_clients, verified
from tests.e2e.server import PATIENCE_SECONDS, Server
from tests.e2e.small_disk import SmallDisk, fill
from tests.postgres import PostgresServer, the_server

ANSWERED, REFUSED = 120, 60
"""Calls answered before and after the failure, and refused during it."""


async def _start_clients(
    scenario: Scenario, server: Server
) -> tuple[asyncio.Event, asyncio.Task[None]]:
    """Start a server and clients; return the event that halts the clients, and their task."""
    await asyncio.to_thread(server.start)
    scenario.set_up(server)
    scenario.add_clients(server)
    halt = asyncio.Event()
    return halt, asyncio.create_task(run_clients(scenario, halt))


@asynccontextmanager
async def _clients_running(scenario: Scenario, server: Server) -> AsyncIterator[None]:
    """Run clients before, during and after a failure, then check everything."""
    halt, running = await _start_clients(scenario, server)
    try:
        await scenario.call_log.wait_for_answers(ANSWERED)
        yield
        await scenario.call_log.wait_for_answers(scenario.call_log.answers + ANSWERED)
    finally:
        halt.set()
        await running
    await asyncio.to_thread(server.wait_until_ready)


def _fail_and_recover(
    scenario: Scenario,
    server: Server,
    failure: AbstractAsyncContextManager[None],
    reason: str,
    refusals: int = REFUSED,
) -> str:
    """Check that a failure refuses writes and serves reads until it is over; return a summary."""

    async def run() -> str:
        async with _clients_running(scenario, server), failure:
            await scenario.call_log.wait_for_refusals(refusals)
            problem = await _problem(server, reason)
            status, _ = await asyncio.to_thread(server.ask, "GET", "/v1/cluster")
            assert status == 200
        return problem

    problem = asyncio.run(run())
    return f"{_check(scenario, server)}; error: {problem}"


def _check(scenario: Scenario, server: Server) -> str:
    scenario.check_state(server)
    rows = verified(server)
    verdict = scenario.check_history(server)
    for sentence in scenario.call_log.retries:
        _is_readable(sentence)
    return f"{verdict}; {rows} rows verified; {scenario.call_log.refusals} writes refused"


def _is_readable(sentence: str) -> None:
    if sentence.startswith("503 "):
        assert len(sentence.split()) > 5, sentence
        for inside in ("Traceback", "Error(", "SELECT", "INSERT", "UPDATE", "sqlalche.me", "\n"):
            assert inside not in sentence, sentence


async def _problem(server: Server, reason: str) -> str:
    """Wait until the server is not ready, and return its log's message about the database.

    Readiness is public, so only the log has the exact cause.
    """
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        content = await asyncio.to_thread(server.readiness)
        lines = [line for line in server.last_lines().splitlines() if "store trouble" in line]
        if content is not None and not content["ready"] and lines and reason in lines[-1]:
            assert any("database" in problem for problem in content["problems"]), content
            return lines[-1].partition("problem=")[2]
        await asyncio.sleep(0.02)
    raise AssertionError(f"no message with {reason!r}: {content} {server.last_lines()}")


# Disk


@asynccontextmanager
async def _kept_full(disk: SmallDisk) -> AsyncIterator[None]:
    """Keep a disk full, even if space is freed; then free it again."""
    over = asyncio.Event()

    async def keep() -> None:
        while not over.is_set():
            await asyncio.to_thread(fill, disk)
            await asyncio.sleep(0.005)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        over.set()
        await keeping
        (disk.view / "ballast").unlink()


def test_a_full_disk_refuses_writes_until_there_is_space(
    seed: int, open_server: Open, small_disk: SmallDisk, tell: Tell
) -> None:
    server = open_server("server")
    small_disk.put(server)
    scenario = Scenario(seed, servers=[server], behavior=Behavior(gives_up=0))
    summary = _fail_and_recover(scenario, server, _kept_full(small_disk), "disk is full")
    tell(f"full disk: {summary}")


def test_a_restart_on_a_full_disk_fails_until_there_is_space(
    seed: int, open_server: Open, small_disk: SmallDisk, tell: Tell
) -> None:
    server = open_server("server")
    small_disk.put(server)
    scenario = Scenario(seed, servers=[server])

    async def go() -> None:
        halt, running = await _start_clients(scenario, server)
        await scenario.call_log.wait_for_answers(ANSWERED)
        await asyncio.to_thread(fill, small_disk)
        await scenario.call_log.wait_for_refusals(REFUSED)
        server.kill()
        halt.set()
        await asyncio.to_thread(fill, small_disk)
        server.launch()
        status = await asyncio.to_thread(server.wait_until_exit)
        last = server.last_lines().splitlines()[-1]
        assert (status, "disk is full" in last) == (2, True), server.last_lines()
        assert last.startswith("slicewise: error: ")
        (small_disk.view / "ballast").unlink()
        await asyncio.to_thread(server.start)
        await running

    asyncio.run(go())
    tell(f"killed on a full disk: {_check(scenario, server)}")


def test_a_failing_disk_refuses_writes_until_it_recovers(
    seed: int, open_server: Open, tell: Tell
) -> None:
    server = open_server("server")
    scenario = Scenario(seed, servers=[server], behavior=Behavior(gives_up=0))
    summary = _fail_and_recover(scenario, server, _failing_writes(server), "SQLITE_IOERR")
    tell(f"failing disk: {summary}")


@asynccontextmanager
async def _failing_writes(server: Server) -> AsyncIterator[None]:
    """Let all writes of a server fail beyond the first page of a file."""
    before = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, before)


def test_it_stops_on_a_full_disk(
    seed: int, open_server: Open, small_disk: SmallDisk, tell: Tell
) -> None:
    server = open_server("server")
    small_disk.put(server)
    scenario = Scenario(seed, servers=[server])
    status = asyncio.run(_stop_during_failure(scenario, server, lambda: fill(small_disk)))
    assert status == 0, server.last_lines()
    (small_disk.view / "ballast").unlink()
    server.start()
    tell(f"ended on a full disk: {_check(scenario, server)}")


async def _stop_during_failure(
    scenario: Scenario, server: Server, failure: Callable[[], None]
) -> int:
    """Terminate a server during a failure; clients abandon the unanswered calls."""
    halt, running = await _start_clients(scenario, server)
    await scenario.call_log.wait_for_answers(ANSWERED)
    await asyncio.to_thread(failure)
    await scenario.call_log.wait_for_refusals(REFUSED)
    status = await asyncio.to_thread(server.stop)
    halt.set()
    for client in scenario.members:
        client.alive = False
    await running
    return status


# Database


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    """A separate PostgreSQL server, which the tests may stop."""
    the_server()  # skips if there is no PostgreSQL
    server = PostgresServer(require_postgres())
    server.start()
    yield server
    server.destroy()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_a_stopped_database_refuses_writes_until_it_is_back(
    how: signal.Signals, seed: int, open_server: Open, database: PostgresServer, tell: Tell
) -> None:
    server = open_server("server", database.database())
    scenario = Scenario(seed, servers=[server], behavior=Behavior(gives_up=0))
    summary = _fail_and_recover(scenario, server, _stopped(database, how), "cannot be reached")
    tell(f"database gone: {summary}")


@asynccontextmanager
async def _stopped(database: PostgresServer, how: signal.Signals) -> AsyncIterator[None]:
    await asyncio.to_thread(database.stop, how)
    try:
        yield
    finally:
        await asyncio.to_thread(database.start)


def test_it_stops_while_the_database_is_down(
    seed: int, open_server: Open, database: PostgresServer, tell: Tell
) -> None:
    server = open_server("server", database.database())
    scenario = Scenario(seed, servers=[server])
    try:
        status = asyncio.run(_stop_during_failure(scenario, server, database.stop))
    finally:
        database.start()
    assert status == 0, server.last_lines()
    server.start()
    tell(f"ended without its database: {_check(scenario, server)}")


def test_cut_database_connections_lose_no_writes(
    seed: int, open_server: Open, database: PostgresServer, tell: Tell
) -> None:
    url = database.database()
    server = open_server("server", url)
    scenario = Scenario(seed, servers=[server], behavior=Behavior(gives_up=0))
    cut = 0

    def cut_all() -> int:
        with psycopg.connect(url, autocommit=True) as connection:
            return len(
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name = 'slicewise' AND datname = current_database()"
                ).fetchall()
            )

    async def go() -> None:
        nonlocal cut
        async with _clients_running(scenario, server):
            for _ in range(15):
                cut += await asyncio.to_thread(cut_all)
                await scenario.call_log.wait_for_answers(
                    scenario.call_log.answers + scenario.rng.randint(1, 40)
                )
                await asyncio.sleep(scenario.rng.random() * 0.01)

    asyncio.run(go())
    assert cut >= 15
    tell(f"{cut} connections cut: {_check(scenario, server)}")


def test_an_unresponsive_database_times_out_and_recovers(
    seed: int, open_server: Open, database: PostgresServer, tell: Tell
) -> None:
    server = open_server("server", database.database())
    scenario = Scenario(seed, servers=[server], behavior=Behavior(gives_up=0, patience=120))
    summary = _fail_and_recover(
        scenario, server, _paused(database), "cannot be reached", refusals=scenario.clients
    )
    tell(f"silent database: {summary}")


@asynccontextmanager
async def _paused(database: PostgresServer) -> AsyncIterator[None]:
    with database.paused():
        yield
