"""A short soak test: memory stays flat under churn on 10,000 GPUs. `tests.e2e.soak` is the long
one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.conftest import Open, Tell
from tests.e2e.scenario import verified
from tests.e2e.server import Server
from tests.e2e.soak import SAMPLES, SETTINGS, Sample, Soak
from tests.postgres import the_server

OPERATIONS = 9_000
WARM_UP = 0.25
"""The store in memory has no cache to fill and writes no snapshots."""


def test_memory_stays_flat_under_churn(open_server: Open, tell: Tell) -> None:
    # SQLite would have to fill its cache first, which takes too long here.
    server = open_server("server", the_server().database(), SETTINGS)
    server.start()
    soak = Soak(server, OPERATIONS, tell=lambda line: None, warm_up=WARM_UP)
    asyncio.run(soak.run())
    tell(f"soak: {soak}")
    assert soak.growth <= soak.margin, [str(sample) for sample in soak.samples]
    assert verified(server) > OPERATIONS
    assert server.stop() == 0


def test_a_memory_leak_is_detected(tmp_path: Path) -> None:
    def soak(leak: int) -> Soak:
        made = Soak(Server(tmp_path), OPERATIONS, warm_up=WARM_UP)
        steps = [OPERATIONS * number // SAMPLES for number in range(1, SAMPLES + 1)]
        made.samples = [Sample(step, 1.0, 140_000_000 + leak * step) for step in steps]
        return made

    for leak in (0, 100):
        assert soak(leak).growth <= soak(leak).margin
    assert soak(1500).growth > soak(1500).margin
