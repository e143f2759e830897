"""Two processes on one PostgreSQL: one leads, the other takes over, and nobody is told two things.

Leaders are killed, stopped in order, and paused until they have been replaced. The clients go on
all the time and know both addresses. The process that follows is read from all the time.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from tests.e2e.conftest import Open, Tell
from tests.e2e.load import Habits
from tests.e2e.record import LABEL
from tests.e2e.server import Server
from tests.e2e.stage import SETTINGS, Stage, journal, perform, verified
from tests.e2e.standing import living
from tests.e2e.wire import Reply, Wire
from tests.postgres import the_server

from slicewise.control.entries import Allocated, Queued

LEASE = "lease.seconds=1"
BETWEEN = 80
"""Calls answered between two events."""
BUSY_PAUSES, QUIET_PAUSES = 3, 4
PLANTED = 6
"""Writes that wait in a paused leader's ear until it wakes up."""
_LONG = 120.0


@dataclass
class Pair:
    """Two processes, and which of them leads."""

    stage: Stage
    leader: Server
    standby: Server
    counts: Counter[str] = field(default_factory=Counter)

    def swap(self) -> None:
        """The other one leads now."""
        self.leader, self.standby = self.standby, self.leader


@asynccontextmanager
async def _at_work(pair: Pair) -> AsyncIterator[None]:
    stage = pair.stage
    await asyncio.to_thread(pair.leader.start)
    stage.furnish(pair.leader)
    pair.leader.lent_token = pair.standby.lent_token = pair.leader.admin_token
    await asyncio.to_thread(pair.standby.launch)
    await asyncio.to_thread(pair.standby.wait_until_ready, "following")
    stage.servers = [pair.leader, pair.standby]
    stage.recruit(pair.leader)
    halt = asyncio.Event()
    show = asyncio.create_task(perform(stage, halt))
    try:
        await _more_answers(stage)
        yield
    finally:
        halt.set()
        await show


async def _more_answers(stage: Stage) -> None:
    await stage.record.reach(stage.record.answers + BETWEEN)


@asynccontextmanager
async def _read_all_the_time(pair: Pair, server: Server) -> AsyncIterator[None]:
    """Whatever happens to the other one, this one tells what it knows, and never knows less."""
    done = asyncio.Event()

    async def read() -> int:
        wire = Wire(server.admin_token, _LONG)
        seen = reads = 0
        while not done.is_set():
            reply = await wire.ask(server.address, "GET", "/v1/cluster")
            assert reply.status == 200, reply
            seq = msgspec.json.decode(reply.body)["seq"]
            assert seq >= seen, f"it told of entry {seen}, and then of {seq}"
            seen, reads = seq, reads + 1
            await asyncio.sleep(0.01)
        wire.close()
        return reads

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        done.set()
        pair.counts["reads of the standby"] += await reading


async def _takes_over(pair: Pair, event: Callable[[], object], busy: bool = True) -> None:
    """Something happens to the leader; the standby leads, and is read from all the while."""
    async with _read_all_the_time(pair, pair.standby):
        await asyncio.to_thread(event)
        await asyncio.to_thread(pair.standby.wait_until_ready, "leading")
        if busy:
            await _more_answers(pair.stage)
    pair.swap()
    pair.counts["takeovers"] += 1


def _judge(pair: Pair) -> str:
    stage = pair.stage
    pair.leader.wait_until_ready("leading")
    stage.look(pair.leader)
    _both_say_the_same(pair)
    rows = verified(pair.leader)
    verdict = stage.judge(pair.leader)
    return f"{dict(pair.counts)}; {verdict}; {rows} rows verified"


def _both_say_the_same(pair: Pair) -> None:
    """The one that follows comes to say what the one that leads says."""
    while True:
        allocations, cluster = living(pair.leader)
        others, its = living(pair.standby)
        if its["seq"] == cluster["seq"]:
            assert others == allocations
            assert its["devices"] == cluster["devices"]
            return


def _pair(seed: int, open_server: Open, patience: float) -> Pair:
    database = the_server().database()
    settings = (*SETTINGS, LEASE)
    stage = Stage(seed, habits=Habits(gives_up=0, patience=patience))
    one, other = (open_server(name, database, settings) for name in ("one", "other"))
    return Pair(stage, one, other)


def test_a_leader_that_is_killed_or_stopped_is_replaced(
    seed: int, open_server: Open, tell: Tell
) -> None:
    pair = _pair(seed, open_server, patience=5.0)

    async def go() -> None:
        async with _at_work(pair):
            for how in ("kill", "stop", "kill"):
                await _takes_over(pair, getattr(pair.leader, how))
                await asyncio.to_thread(pair.standby.launch)
                await asyncio.to_thread(pair.standby.wait_until_ready, "following")
                await _more_answers(pair.stage)

    asyncio.run(go())
    tell(f"leaders killed and stopped: {_judge(pair)}")
    assert pair.counts["takeovers"] == 3


def test_a_leader_that_was_paused_and_replaced_is_refused_and_follows(
    seed: int, open_server: Open, tell: Tell
) -> None:
    pair = _pair(seed, open_server, patience=1.0)
    planted: list[str] = []
    refusals: Counter[str] = Counter()

    async def pause(busy: bool) -> None:
        old = pair.leader
        keys = [f"planted-{len(planted) + number}" for number in range(PLANTED)]
        planted.extend(keys)
        old.signal(signal.SIGSTOP)
        writes = [asyncio.create_task(_plant(old, key)) for key in keys]
        await _takes_over(pair, lambda: None, busy)
        old.signal(signal.SIGCONT)
        for reply in await asyncio.gather(*writes):
            assert reply.status == 503, reply
            refusals[msgspec.json.decode(reply.body)["detail"].split(";")[0]] += 1
        said = await asyncio.to_thread(old.wait_until_ready, "following")
        assert said["leader"] == pair.leader.url
        if busy:
            await _more_answers(pair.stage)

    async def go() -> None:
        async with _at_work(pair):
            for _ in range(BUSY_PAUSES):
                await pause(busy=True)
        # The new leader writes nothing now, so only the epoch tells that the old one is stale.
        for _ in range(QUIET_PAUSES):
            await pause(busy=False)

    asyncio.run(go())
    tell(f"leaders paused: {_judge(pair)}; the stale ones said {dict(refusals)}")
    assert pair.counts["takeovers"] == BUSY_PAUSES + QUIET_PAUSES
    assert refusals.total() == len(planted)
    made = {
        row.entry.allocation.labels.get(LABEL)
        for row in journal(pair.leader)
        if isinstance(row.entry, Allocated | Queued)
    }
    assert made.isdisjoint(planted)


async def _plant(server: Server, key: str) -> Reply:
    """Ask a paused leader for an instance: it will hear of it when it wakes up."""
    wire = Wire(server.admin_token, _LONG)
    body = {"profile": "1g.10gb", "tenant": "red", "labels": {LABEL: key}}
    try:
        return await wire.ask(
            server.address, "POST", "/v1/allocations", msgspec.json.encode(body), key
        )
    finally:
        wire.close()
