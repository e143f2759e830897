"""Two processes on one PostgreSQL: the standby takes over, and answers stay consistent.

Leaders are killed, stopped cleanly, and paused until they have been replaced. Clients keep calling
and know both addresses. The follower is read from all the time.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from tests.e2e.call_log import LABEL
from tests.e2e.conftest import Open, Tell
from tests.e2e.load import Behavior
from tests.e2e.scenario import SETTINGS, Scenario, journal, run_clients, verified
from tests.e2e.server import Server
from tests.e2e.state_comparison import open_allocations
from tests.e2e.wire import Reply, Wire
from tests.postgres import the_server

from slicewise.journal.entries import Allocated, Queued

LEASE = "lease.seconds=1"
BETWEEN = 80
"""Calls answered between two failovers."""
BUSY_PAUSES, QUIET_PAUSES = 3, 4
PENDING_WRITES = 6
"""Writes sent to a paused leader, which it reads after it resumes."""
_LONG = 120.0


@dataclass
class Pair:
    """Two processes: the leader and the standby."""

    scenario: Scenario
    leader: Server
    standby: Server
    counts: Counter[str] = field(default_factory=Counter)

    def swap(self) -> None:
        """Swap the roles."""
        self.leader, self.standby = self.standby, self.leader


@asynccontextmanager
async def _clients_running(pair: Pair) -> AsyncIterator[None]:
    scenario = pair.scenario
    await asyncio.to_thread(pair.leader.start)
    scenario.set_up(pair.leader)
    pair.leader.lent_token = pair.standby.lent_token = pair.leader.admin_token
    await asyncio.to_thread(pair.standby.launch)
    await asyncio.to_thread(pair.standby.wait_until_ready, "following")
    scenario.servers = [pair.leader, pair.standby]
    scenario.add_clients(pair.leader)
    halt = asyncio.Event()
    running = asyncio.create_task(run_clients(scenario, halt))
    try:
        await _more_answers(scenario)
        yield
    finally:
        halt.set()
        await running


async def _more_answers(scenario: Scenario) -> None:
    await scenario.call_log.wait_for_answers(scenario.call_log.answers + BETWEEN)


@asynccontextmanager
async def _read_continuously(pair: Pair, server: Server) -> AsyncIterator[None]:
    """Check that reads from this server keep working and never go back in time."""
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


async def _fail_over(pair: Pair, event: Callable[[], object], busy: bool = True) -> None:
    """Run an event that ends the leader; the standby takes over and serves reads throughout."""
    async with _read_continuously(pair, pair.standby):
        await asyncio.to_thread(event)
        await asyncio.to_thread(pair.standby.wait_until_ready, "leading")
        if busy:
            await _more_answers(pair.scenario)
    pair.swap()
    pair.counts["takeovers"] += 1


def _check(pair: Pair) -> str:
    scenario = pair.scenario
    pair.leader.wait_until_ready("leading")
    scenario.check_state(pair.leader)
    _check_both_agree(pair)
    rows = verified(pair.leader)
    verdict = scenario.check_history(pair.leader)
    return f"{dict(pair.counts)}; {verdict}; {rows} rows verified"


def _check_both_agree(pair: Pair) -> None:
    """Wait until the follower reports the same state as the leader."""
    while True:
        allocations, cluster = open_allocations(pair.leader)
        others, its = open_allocations(pair.standby)
        if its["seq"] == cluster["seq"]:
            assert others == allocations
            assert its["devices"] == cluster["devices"]
            return


def _pair(seed: int, open_server: Open, patience: float) -> Pair:
    database = the_server().database()
    settings = (*SETTINGS, LEASE)
    scenario = Scenario(seed, behavior=Behavior(gives_up=0, patience=patience))
    one, other = (open_server(name, database, settings) for name in ("one", "other"))
    return Pair(scenario, one, other)


def test_standby_takes_over_from_a_killed_or_stopped_leader(
    seed: int, open_server: Open, tell: Tell
) -> None:
    pair = _pair(seed, open_server, patience=5.0)

    async def go() -> None:
        async with _clients_running(pair):
            for how in ("kill", "stop", "kill"):
                await _fail_over(pair, getattr(pair.leader, how))
                await asyncio.to_thread(pair.standby.launch)
                await asyncio.to_thread(pair.standby.wait_until_ready, "following")
                await _more_answers(pair.scenario)

    asyncio.run(go())
    tell(f"leaders killed and stopped: {_check(pair)}")
    assert pair.counts["takeovers"] == 3


def test_a_resumed_stale_leader_is_fenced_and_follows(
    seed: int, open_server: Open, tell: Tell
) -> None:
    pair = _pair(seed, open_server, patience=1.0)
    planted: list[str] = []
    refusals: Counter[str] = Counter()

    async def pause(busy: bool) -> None:
        old = pair.leader
        keys = [f"planted-{len(planted) + number}" for number in range(PENDING_WRITES)]
        planted.extend(keys)
        old.signal(signal.SIGSTOP)
        writes = [asyncio.create_task(_send_to_paused(old, key)) for key in keys]
        await _fail_over(pair, lambda: None, busy)
        old.signal(signal.SIGCONT)
        for reply in await asyncio.gather(*writes):
            assert reply.status == 503, reply
            refusals[msgspec.json.decode(reply.body)["detail"].split(";")[0]] += 1
        content = await asyncio.to_thread(old.wait_until_ready, "following")
        assert content["leader"] == pair.leader.url
        if busy:
            await _more_answers(pair.scenario)

    async def go() -> None:
        async with _clients_running(pair):
            for _ in range(BUSY_PAUSES):
                await pause(busy=True)
        # The new leader writes nothing now, so only the epoch shows that the old one is stale.
        for _ in range(QUIET_PAUSES):
            await pause(busy=False)

    asyncio.run(go())
    tell(f"leaders paused: {_check(pair)}; errors of stale leaders: {dict(refusals)}")
    assert pair.counts["takeovers"] == BUSY_PAUSES + QUIET_PAUSES
    assert refusals.total() == len(planted)
    made = {
        row.entry.allocation.labels.get(LABEL)
        for row in journal(pair.leader)
        if isinstance(row.entry, Allocated | Queued)
    }
    assert made.isdisjoint(planted)


async def _send_to_paused(server: Server, key: str) -> Reply:
    """Send an allocation request to a paused leader, which reads it after it resumes."""
    wire = Wire(server.admin_token, _LONG)
    body = {"profile": "1g.10gb", "tenant": "red", "labels": {LABEL: key}}
    try:
        return await wire.ask(
            server.address, "POST", "/v1/allocations", msgspec.json.encode(body), key
        )
    finally:
        wire.close()
