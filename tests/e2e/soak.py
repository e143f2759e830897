"""A soak test: churn on 10,000 GPUs at full speed, and the memory of the service.

    python -m tests.e2e.soak

An hour of a busy cluster is taken as 100 calls a second: 360,000 calls, the default of
``--operations``. First the cluster is filled. Then every client repeatedly ends an allocation and
creates another, with needs, counts, leases and waits among them, while one client follows the
events and one scrapes the metrics. The test fails if, after a warm-up, the service's memory in the
last third exceeds that in the first third by more than the margin.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from tests.e2e.load import PROFILES
from tests.e2e.server import Server
from tests.e2e.wire import LostError, Wire

HOUR = 360_000
GPUS = 10_000
NODE_GPUS = 100
SETTINGS = ("limits.requests_per_second=1000000",)
FULL = 0.9
"""Share of all slices in use before the churn begins."""
CLIENTS = 32
SAMPLES = 60
WARM_UP = 0.5
"""Share of the operations after which memory must not grow: by then SQLite's cache is full, and
snapshots of the state exist."""
MARGIN_BYTES = 4 << 20
MARGIN_PART = 0.03
_PATIENCE = 120.0
_FILLING = ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb")
_EXPECTED = frozenset({200, 201, 202, 409})


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements after a number of operations."""

    operations: int
    seconds: float
    resident: int

    def __str__(self) -> str:
        rate = self.operations / self.seconds if self.seconds else 0.0
        return (
            f"{self.operations:>9,} operations  {self.seconds:7.1f} s  {rate:7.0f} /s  "
            f"{self.resident / 2**20:8.1f} MiB resident"
        )


@dataclass
class Soak:
    """A soak run and its results."""

    server: Server
    operations: int = HOUR
    gpus: int = GPUS
    seed: int = 1
    tell: Callable[[str], None] = print
    warm_up: float = WARM_UP
    samples: list[Sample] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._active: list[str] = []
        self._begun = 0
        self._done = 0
        self._events = 0
        self._scrapes = 0
        self._name = f"{self.seed}-{time.time_ns()}"

    # Results

    @property
    def growth(self) -> int:
        """Growth of memory from the first third after the warm-up to the last."""
        first, last = self._thirds()
        return max(sample.resident for sample in last) - max(sample.resident for sample in first)

    @property
    def margin(self) -> int:
        """Allowed growth."""
        first, _ = self._thirds()
        return max(MARGIN_BYTES, int(MARGIN_PART * max(sample.resident for sample in first)))

    def _thirds(self) -> tuple[list[Sample], list[Sample]]:
        warm = [s for s in self.samples if s.operations >= self.warm_up * self.operations]
        third = len(warm) // 3
        assert third, "too few samples"
        return warm[:third], warm[-third:]

    def __str__(self) -> str:
        first = self.samples[-1]
        return (
            f"{self.gpus:,} GPUs, {len(self._active):,} active, {first}; "
            f"grew by {self.growth / 2**20:.1f} MiB of {self.margin / 2**20:.1f} MiB allowed; "
            f"{self._events:,} events followed, {self._scrapes} scrapes, {dict(self.statuses)}"
        )

    # Run

    async def run(self) -> None:
        """Fill the cluster, then run the churn."""
        self._furnish()
        await self._fill()
        over = asyncio.Event()
        aside = [
            asyncio.create_task(self._follow(over)),
            asyncio.create_task(self._scrape(over)),
        ]
        begun = time.monotonic()
        watch = asyncio.create_task(self._watch(begun))
        try:
            await asyncio.gather(*(self._churn(number) for number in range(CLIENTS)))
            await watch
        finally:
            over.set()
            watch.cancel()
            for task in aside:
                task.cancel()
            await asyncio.gather(watch, *aside, return_exceptions=True)

    def _furnish(self) -> None:
        for number in range(0, self.gpus, NODE_GPUS):
            model = "A30-24GB" if number % (5 * NODE_GPUS) == 0 else "A100-80GB"
            body = {
                "name": f"n{number}",
                "model": model,
                "gpus": min(NODE_GPUS, self.gpus - number),
            }
            status, content = self.server.ask("POST", "/v1/nodes", body)
            assert status == 201, content

    async def _fill(self) -> None:
        wire = Wire(self.server.admin_token, _PATIENCE)
        number = 0
        while True:
            number += 1
            batch = [{"profile": self._rng.choice(_FILLING)} for _ in range(100)]
            content = await self._ask(
                wire, "POST", "/v1/allocations/batch", {"allocations": batch}, f"fill-{number}"
            )
            if "allocations" not in content:
                break  # full, or almost full
            self._active += [one["id"] for one in content["allocations"]]
            cluster = await self._ask(wire, "GET", "/v1/cluster")
            if cluster["free_slices"] <= (1 - FULL) * cluster["slices"]:
                break
        wire.close()
        self.statuses.clear()
        self.tell(f"{self.gpus:,} GPUs, {len(self._active):,} allocations to begin with")

    def _profile(self) -> str:
        return self._rng.choices(list(PROFILES), list(PROFILES.values()))[0]

    def _terms(self) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.2:
            terms: dict[str, Any] = {
                "need": {"compute": rng.randint(1, 3), "memory_gb": round(rng.uniform(1, 20), 2)}
            }
        else:
            terms = {"profile": self._profile()}
        if rng.random() < 0.05:
            terms["count"] = rng.randint(2, 4)
        if rng.random() < 0.1:
            terms["lease_seconds"] = round(rng.uniform(0.1, 5), 3)
        if rng.random() < 0.1:
            terms["wait_seconds"] = round(rng.uniform(0.1, 2), 3)
        if rng.random() < 0.2:
            terms["labels"] = {"job": str(rng.randint(0, 1 << 30))}
        return terms

    async def _churn(self, client: int) -> None:
        wire = Wire(self.server.admin_token, _PATIENCE)
        active, rng = self._active, self._rng
        created = released = 0
        while self._begun < self.operations:
            self._begun += 2
            if active:
                index = rng.randrange(len(active))
                active[index], active[-1] = active[-1], active[index]
                gone = active.pop()
                released += 1
                await self._ask(
                    wire,
                    "DELETE",
                    f"/v1/allocations/{gone}",
                    key=f"{self._name}-{client}-r{released}",
                )
            self._done += 1
            created += 1
            content = await self._ask(
                wire,
                "POST",
                "/v1/allocations",
                self._terms(),
                f"{self._name}-{client}-c{created}",
            )
            if "id" in content:
                active.append(content["id"])
            self._done += 1
        wire.close()

    async def _ask(
        self, wire: Wire, method: str, path: str, body: object = None, key: str | None = None
    ) -> dict[str, Any]:
        data = b"" if body is None else msgspec.json.encode(body)
        reply = await wire.ask(self.server.address, method, path, data, key)
        self.statuses[f"{method} {reply.status}"] += 1
        assert reply.status in _EXPECTED, reply
        content: dict[str, Any] = msgspec.json.decode(reply.body)
        return content

    # Observers

    async def _watch(self, begun: float) -> None:
        """Take a sample at fixed numbers of operations."""
        for number in range(1, SAMPLES + 1):
            target = self.operations * number // SAMPLES
            while self._done < min(target, self.operations):
                await asyncio.sleep(0.005)
            sample = Sample(self._done, time.monotonic() - begun, self.server.resident_bytes)
            self.samples.append(sample)
            if number % (SAMPLES // 12) == 0:
                self.tell(str(sample))

    async def _follow(self, over: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection(*self.server.address)
        token = self.server.admin_token
        writer.write(
            f"GET /v1/events HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer {token}\r\n\r\n".encode()
        )
        try:
            while not over.is_set() and (chunk := await reader.read(1 << 16)):
                self._events += chunk.count(b"\nevent: ")
        finally:
            writer.transport.abort()

    async def _scrape(self, over: asyncio.Event) -> None:
        wire = Wire(self.server.admin_token, _PATIENCE)
        try:
            while not over.is_set():
                reply = await wire.ask(self.server.address, "GET", "/metrics")
                assert reply.status == 200, reply
                self._scrapes += 1
                await asyncio.sleep(0.5)
        except LostError:
            if not over.is_set():
                raise
        finally:
            wire.close()


def main() -> int:
    """Run a soak test from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--operations", type=int, default=HOUR)
    parser.add_argument("--gpus", type=int, default=GPUS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", help="the URL of a PostgreSQL database, instead of SQLite")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slicewise-soak-") as folder:
        server = Server(Path(folder), database=given.database, settings=SETTINGS)
        soak = Soak(server, given.operations, given.gpus, given.seed)
        try:
            server.start()
            asyncio.run(soak.run())
            print(soak)
            stopped = server.stop()
        finally:
            server.kill()
    if soak.growth > soak.margin:
        print("memory grew by more than the margin", file=sys.stderr)
        return 1
    return stopped


if __name__ == "__main__":
    sys.exit(main())
