"""kill -9 at random moments under load: no answered write is lost, and no other appears.

``SLICEWISE_CRASH_CYCLES`` is the number of kills.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter

import pytest
from tests.e2e.conftest import Open, Tell
from tests.e2e.scenario import SETTINGS, Scenario, run_clients, verified
from tests.e2e.server import Server
from tests.postgres import the_server

CYCLES = int(os.environ.get("SLICEWISE_CRASH_CYCLES", "12"))
ROUND = 25
"""Cycles per database: the whole history is checked after each."""
REPEATED_CALLS = 10


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_kill_at_random_moments_loses_no_write_and_adds_none(
    kind: str, seed: int, open_server: Open, tell: Tell
) -> None:
    rng = random.Random(f"{seed} {kind}")
    total: Counter[str] = Counter()
    for first in range(0, CYCLES, ROUND):
        database = the_server().database() if kind == "postgresql" else None
        # Round-robin has state, which must be restored too.
        policy = "round-robin" if kind == "postgresql" else "default"
        server = open_server(f"round-{first}", database, (*SETTINGS, f"policy={policy}"))
        scenario = Scenario(rng.getrandbits(32), servers=[server], operated=True, policy=policy)
        cycles = min(ROUND, CYCLES - first)
        counts = asyncio.run(_round(scenario, server, cycles))
        tell(f"{kind}: {cycles} cycles, {dict(counts)}; {scenario.check_history(server)}")
        total += counts
        assert server.stop() == 0
    assert total["kills"] >= CYCLES
    assert total["calls lost"] > 0
    assert total["repeated"] > 0


async def _round(scenario: Scenario, server: Server, cycles: int) -> Counter[str]:
    rng, record, counts = scenario.rng, scenario.call_log, Counter[str]()
    server.start()
    scenario.set_up(server)
    boot = 0.0
    for cycle in range(cycles):
        scenario.add_clients(server)
        halt = asyncio.Event()
        running = asyncio.create_task(run_clients(scenario, halt))
        await record.wait_for_answers(record.answers + rng.randint(20, 300))
        await asyncio.sleep(rng.random() * 0.02)
        server.kill()
        counts["kills"] += 1
        halt.set()
        if rng.random() < 0.2:  # kill it again during the restart
            server.launch()
            await asyncio.sleep(rng.random() * boot)
            server.kill()
            counts["kills"] += 1
        begun = time.monotonic()
        await asyncio.to_thread(server.start)
        boot = time.monotonic() - begun
        await running
        await asyncio.to_thread(scenario.check_state, server)
        counts["repeated"] += await scenario.repeat_calls(REPEATED_CALLS)
        counts["rows verified"] += await asyncio.to_thread(verified, server)
        if cycle % 8 == 7:  # a clean stop writes a snapshot, which later starts load
            assert await asyncio.to_thread(server.stop) == 0
            counts["stops"] += 1
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(scenario.check_state, server)
    counts["calls"] = record.answers
    counts["calls lost"] = sum(call.sent > 1 for call in record.calls) + len(record.unknown)
    counts["answers replayed"] = sum(call.replayed for call in record.calls)
    return counts
