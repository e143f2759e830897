"""Live traffic: tenants request allocations, hold them for a while, and release them.

Arrivals are Poisson, as in the steady experiment, but in real time and through the HTTP API.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Mapping

from slicewise.client import ApiError, AsyncClient, RejectedError, UnreachableError
from slicewise.demo.cluster import TENANTS, DemoTenant

_MAX_IN_FLIGHT = 50
"""The maximum number of requests in flight, which protects a slow service."""


class Traffic:
    """Requests of all tenants at a mean rate, until it is stopped."""

    def __init__(
        self,
        server: str,
        secrets: Mapping[str, str],
        rng: random.Random,
        per_second: float,
        mean_seconds: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Requests by outcome: placed, queued, rejected, failed."""
        self._clients = {
            tenant.name: AsyncClient(server, secrets[tenant.name]) for tenant in TENANTS
        }
        self._rng = rng
        self._per_second = per_second
        self._mean_seconds = mean_seconds
        self._requests: set[asyncio.Task[None]] = set()
        self._holds: set[asyncio.Task[None]] = set()

    async def run(self, requests: int | None = None) -> None:
        """Send requests until cancelled, or a given number of them; then stop all tasks."""
        sent = 0
        try:
            while requests is None or sent < requests:
                await asyncio.sleep(self._rng.expovariate(self._per_second))
                if len(self._requests) >= _MAX_IN_FLIGHT:
                    await asyncio.wait(self._requests, return_when=asyncio.FIRST_COMPLETED)
                tenant = self._rng.choices(TENANTS, [tenant.share for tenant in TENANTS])[0]
                profile = self._rng.choices(list(tenant.weights), list(tenant.weights.values()))[0]
                seconds = 0.1 + self._rng.expovariate(1 / self._mean_seconds)
                app = f"{tenant.name}-{self._rng.randrange(20):02d}"
                # Requests do not wait for one another, which keeps the rate.
                _begin(self._request(tenant, profile, seconds, app), self._requests)
                sent += 1
            await asyncio.gather(*self._requests)
        finally:
            under_way = [*self._requests, *self._holds]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            for client in self._clients.values():
                await client.close()

    async def _request(self, tenant: DemoTenant, profile: str, seconds: float, app: str) -> None:
        client = self._clients[tenant.name]
        try:
            allocation = await client.allocate(
                profile,
                wait_seconds=tenant.wait_seconds,
                priority=tenant.priority,
                # A long lease for tenants that release themselves: if this process is killed,
                # their allocations end anyway.
                lease_seconds=seconds if tenant.wait_seconds else 20 * self._mean_seconds,
                labels={"app": app},
            )
        except RejectedError as rejection:
            self.counts[f"rejected ({rejection.reason})"] += 1
            return
        except (ApiError, UnreachableError):
            self.counts["failed"] += 1
            return
        self.counts[allocation.state] += 1
        if not tenant.wait_seconds:
            _begin(self._hold(client, allocation.id, seconds), self._holds)

    async def _hold(self, client: AsyncClient, identity: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            await client.release(identity)
        except (ApiError, UnreachableError):
            self.counts["failed"] += 1

    def summary(self) -> str:
        """The outcomes so far, in one line."""
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return f"{self.counts.total()} requests: {counts or 'none yet'}"


def _begin(work: Coroutine[None, None, None], under_way: set[asyncio.Task[None]]) -> None:
    """Start a task and keep it in the set until it is done."""
    task = asyncio.create_task(work)
    under_way.add(task)
    task.add_done_callback(under_way.discard)
