"""A full disk, a disk that fails and a database cut off: clear errors, and all is well again.

In each the clients go on all the time. Nobody restarts anything but what was broken.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from scripts.test_services import require_postgres
from tests.e2e.conftest import Open, Tell
from tests.e2e.load import Habits
from tests.e2e.server import PATIENCE_SECONDS, Server
from tests.e2e.small_disk import SmallDisk, fill
from tests.e2e.stage import Stage, perform, verified
from tests.postgres import PostgresServer, the_server

CALM, TROUBLED = 120, 60
"""Calls answered before and after the trouble, and turned away meanwhile."""


@asynccontextmanager
async def _at_work(stage: Stage, server: Server) -> AsyncIterator[None]:
    """Clients at work before, during and after something goes wrong; then everything is checked."""
    await asyncio.to_thread(server.start)
    stage.furnish(server)
    stage.recruit(server)
    halt = asyncio.Event()
    show = asyncio.create_task(perform(stage, halt))
    try:
        await stage.record.reach(CALM)
        yield
        await stage.record.reach(stage.record.answers + CALM)
    finally:
        halt.set()
        await show
    await asyncio.to_thread(server.wait_until_ready)


def _judge(stage: Stage, server: Server) -> str:
    stage.look(server)
    rows = verified(server)
    verdict = stage.judge(server)
    for sentence in stage.record.troubles:
        _is_for_people(sentence)
    return f"{verdict}; {rows} rows verified; {stage.record.turned_away} times turned away"


def _is_for_people(sentence: str) -> None:
    if sentence.startswith("503 "):
        assert len(sentence.split()) > 5, sentence
        for inside in ("Traceback", "Error(", "SELECT", "INSERT", "UPDATE", "sqlalche.me", "\n"):
            assert inside not in sentence, sentence


async def _problem(server: Server, reason: str) -> str:
    """Ask until it says that it is not ready, and return what its log says of the database.

    Anybody may ask whether a process is ready, so what exactly is wrong stands in the log alone.
    """
    give_up = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < give_up:
        said = await asyncio.to_thread(server.readiness)
        lines = [line for line in server.last_lines().splitlines() if "store trouble" in line]
        if said is not None and not said["ready"] and lines and reason in lines[-1]:
            assert any("database" in problem for problem in said["problems"]), said
            return lines[-1].partition("problem=")[2]
        await asyncio.sleep(0.02)
    raise AssertionError(f"nobody says {reason!r}: {said} {server.last_lines()}")


async def _reads_go_on(server: Server) -> None:
    status, _ = await asyncio.to_thread(server.ask, "GET", "/v1/cluster")
    assert status == 200


# The disk


@asynccontextmanager
async def _kept_full(disk: SmallDisk) -> AsyncIterator[None]:
    """Leave no room on a disk, also when some is freed; then free what was taken."""
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


def test_a_full_disk_turns_writes_away_until_there_is_room(
    seed: int, open_server: Open, small_disk: SmallDisk, tell: Tell
) -> None:
    server = open_server("server")
    small_disk.put(server)
    stage = Stage(seed, servers=[server], habits=Habits(gives_up=0))

    async def go() -> str:
        async with _at_work(stage, server), _kept_full(small_disk):
            await stage.record.reach_trouble(TROUBLED)
            problem = await _problem(server, "disk is full")
            await _reads_go_on(server)
        return problem

    problem = asyncio.run(go())
    tell(f"full disk: {_judge(stage, server)}; it said: {problem}")


def test_killed_on_a_full_disk_it_says_so_and_comes_back_when_there_is_room(
    seed: int, open_server: Open, small_disk: SmallDisk, tell: Tell
) -> None:
    server = open_server("server")
    small_disk.put(server)
    stage = Stage(seed, servers=[server])

    async def go() -> None:
        await asyncio.to_thread(server.start)
        stage.furnish(server)
        stage.recruit(server)
        halt = asyncio.Event()
        show = asyncio.create_task(perform(stage, halt))
        await stage.record.reach(CALM)
        await asyncio.to_thread(fill, small_disk)
        await stage.record.reach_trouble(TROUBLED)
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
        await show

    asyncio.run(go())
    tell(f"killed on a full disk: {_judge(stage, server)}")


def test_a_disk_that_fails_turns_writes_away_until_it_is_well(
    seed: int, open_server: Open, tell: Tell
) -> None:
    server = open_server("server")
    stage = Stage(seed, servers=[server], habits=Habits(gives_up=0))

    async def go() -> str:
        async with _at_work(stage, server):
            before = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
            # Whatever is written behind the first page of a file fails.
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (4096, before[1]))
            await stage.record.reach_trouble(TROUBLED)
            problem = await _problem(server, "SQLITE_IOERR")
            await _reads_go_on(server)
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, before)
        return problem

    problem = asyncio.run(go())
    tell(f"failing disk: {_judge(stage, server)}; it said: {problem}")


def test_asked_to_end_on_a_full_disk_it_ends(
    seed: int, open_server: Open, small_disk: SmallDisk, tell: Tell
) -> None:
    server = open_server("server")
    small_disk.put(server)
    stage = Stage(seed, servers=[server])
    status = asyncio.run(_asked_to_end(stage, server, lambda: fill(small_disk)))
    assert status == 0, server.last_lines()
    (small_disk.view / "ballast").unlink()
    server.start()
    tell(f"ended on a full disk: {_judge(stage, server)}")


async def _asked_to_end(stage: Stage, server: Server, trouble: Callable[[], None]) -> int:
    """Ask a server in trouble to end; clients give up on what it did not answer."""
    await asyncio.to_thread(server.start)
    stage.furnish(server)
    stage.recruit(server)
    halt = asyncio.Event()
    show = asyncio.create_task(perform(stage, halt))
    await stage.record.reach(CALM)
    await asyncio.to_thread(trouble)
    await stage.record.reach_trouble(TROUBLED)
    status = await asyncio.to_thread(server.stop)
    halt.set()
    for client in stage.troop:
        client.alive = False
    await show
    return status


# The database


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    """A PostgreSQL server of these tests' own, which they may stop."""
    the_server()  # or there is none, and these are skipped as all that need one
    server = PostgresServer(require_postgres())
    server.start()
    yield server
    server.destroy()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_a_database_that_is_gone_turns_writes_away_until_it_is_back(
    how: signal.Signals, seed: int, open_server: Open, database: PostgresServer, tell: Tell
) -> None:
    server = open_server("server", database.database())
    stage = Stage(seed, servers=[server], habits=Habits(gives_up=0))

    async def go() -> str:
        async with _at_work(stage, server):
            await asyncio.to_thread(database.stop, how)
            await stage.record.reach_trouble(TROUBLED)
            problem = await _problem(server, "cannot be reached")
            await _reads_go_on(server)
            await asyncio.to_thread(database.start)
        return problem

    problem = asyncio.run(go())
    tell(f"database gone: {_judge(stage, server)}; it said: {problem}")


def test_asked_to_end_while_the_database_is_gone_it_ends(
    seed: int, open_server: Open, database: PostgresServer, tell: Tell
) -> None:
    server = open_server("server", database.database())
    stage = Stage(seed, servers=[server])
    try:
        status = asyncio.run(_asked_to_end(stage, server, database.stop))
    finally:
        database.start()
    assert status == 0, server.last_lines()
    server.start()
    tell(f"ended without its database: {_judge(stage, server)}")


def test_connections_that_are_cut_lose_nothing(
    seed: int, open_server: Open, database: PostgresServer, tell: Tell
) -> None:
    url = database.database()
    server = open_server("server", url)
    stage = Stage(seed, servers=[server], habits=Habits(gives_up=0))
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
        async with _at_work(stage, server):
            for _ in range(15):
                cut += await asyncio.to_thread(cut_all)
                await stage.record.reach(stage.record.answers + stage.rng.randint(1, 40))
                await asyncio.sleep(stage.rng.random() * 0.01)

    asyncio.run(go())
    assert cut >= 15
    tell(f"{cut} connections cut: {_judge(stage, server)}")


def test_a_database_that_is_silent_is_given_up_and_taken_up_again(
    seed: int, open_server: Open, database: PostgresServer, tell: Tell
) -> None:
    server = open_server("server", database.database())
    stage = Stage(seed, servers=[server], habits=Habits(gives_up=0, patience=120))

    async def go() -> str:
        async with _at_work(stage, server):
            with database.paused():
                await stage.record.reach_trouble(stage.clients)
                problem = await _problem(server, "cannot be reached")
                await _reads_go_on(server)
        return problem

    problem = asyncio.run(go())
    tell(f"silent database: {_judge(stage, server)}; it said: {problem}")
