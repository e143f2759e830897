"""kill -9 at random moments under load: what was answered is there, and nothing else is.

``SLICEWISE_CRASH_CYCLES`` says how often; the more the longer.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter

import pytest
from tests.e2e.conftest import Open, Tell
from tests.e2e.server import Server
from tests.e2e.stage import SETTINGS, Stage, perform, verified
from tests.postgres import the_server

CYCLES = int(os.environ.get("SLICEWISE_CRASH_CYCLES", "25"))
ROUND = 25
"""Cycles on one database: all that was ever written is looked at after each."""
ASKED_AGAIN = 10


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_killed_at_random_moments_nothing_is_lost_and_nothing_appears(
    kind: str, seed: int, open_server: Open, tell: Tell
) -> None:
    rng = random.Random(f"{seed} {kind}")
    total: Counter[str] = Counter()
    for first in range(0, CYCLES, ROUND):
        database = the_server().database() if kind == "postgresql" else None
        # One that goes round has a memory of its own, which must come back as well.
        policy = "round-robin" if kind == "postgresql" else "default"
        server = open_server(f"round-{first}", database, (*SETTINGS, f"policy={policy}"))
        stage = Stage(rng.getrandbits(32), servers=[server], operated=True, policy=policy)
        cycles = min(ROUND, CYCLES - first)
        counts = asyncio.run(_round(stage, server, cycles))
        tell(f"{kind}: {cycles} cycles, {dict(counts)}; {stage.judge(server)}")
        total += counts
        assert server.stop() == 0
    assert total["kills"] >= CYCLES
    assert total["calls lost"] > 0
    assert total["asked again"] > 0


async def _round(stage: Stage, server: Server, cycles: int) -> Counter[str]:
    rng, record, counts = stage.rng, stage.record, Counter[str]()
    server.start()
    stage.furnish(server)
    boot = 0.0
    for cycle in range(cycles):
        stage.recruit(server)
        halt = asyncio.Event()
        show = asyncio.create_task(perform(stage, halt))
        await record.reach(record.answers + rng.randint(20, 300))
        await asyncio.sleep(rng.random() * 0.02)
        server.kill()
        counts["kills"] += 1
        halt.set()
        if rng.random() < 0.2:  # and once more, while it comes back
            server.launch()
            await asyncio.sleep(rng.random() * boot)
            server.kill()
            counts["kills"] += 1
        begun = time.monotonic()
        await asyncio.to_thread(server.start)
        boot = time.monotonic() - begun
        await show
        await asyncio.to_thread(stage.look, server)
        counts["asked again"] += await stage.ask_again(ASKED_AGAIN)
        counts["rows verified"] += await asyncio.to_thread(verified, server)
        if cycle % 8 == 7:  # ended in order, it keeps an image, from which later starts begin
            assert await asyncio.to_thread(server.stop) == 0
            counts["stops"] += 1
            await asyncio.to_thread(server.start)
            await asyncio.to_thread(stage.look, server)
    counts["calls"] = record.answers
    counts["calls lost"] = sum(call.sent > 1 for call in record.calls) + len(record.unknown)
    counts["answers replayed"] = sum(call.replayed for call in record.calls)
    return counts
