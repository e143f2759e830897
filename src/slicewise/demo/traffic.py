"""Live traffic: tenants who come, ask, hold what they get for a while, and give it back.

Arrivals are as in the steady experiment, only in real time and through the service's front door.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Mapping

from slicewise.client import ApiError, AsyncClient, RejectedError, UnreachableError
from slicewise.demo.scene import GUESTS, Guest

_AT_ONCE = 50
"""Requests under way at most: a service that does not keep up is not asked ever more."""


class Traffic:
    """Requests of all guests, so many a second, until it is stopped."""

    def __init__(
        self,
        server: str,
        secrets: Mapping[str, str],
        rng: random.Random,
        per_second: float,
        mean_seconds: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """How many were placed, queued and rejected."""
        self._clients = {guest.name: AsyncClient(server, secrets[guest.name]) for guest in GUESTS}
        self._rng = rng
        self._per_second = per_second
        self._mean_seconds = mean_seconds
        self._asking: set[asyncio.Task[None]] = set()
        self._stays: set[asyncio.Task[None]] = set()

    async def run(self, requests: int | None = None) -> None:
        """Go on for ever, or for so many requests; nobody comes or goes after that."""
        asked = 0
        try:
            while requests is None or asked < requests:
                await asyncio.sleep(self._rng.expovariate(self._per_second))
                if len(self._asking) >= _AT_ONCE:
                    await asyncio.wait(self._asking, return_when=asyncio.FIRST_COMPLETED)
                guest = self._rng.choices(GUESTS, [guest.share for guest in GUESTS])[0]
                profile = self._rng.choices(list(guest.likes), list(guest.likes.values()))[0]
                seconds = 0.1 + self._rng.expovariate(1 / self._mean_seconds)
                app = f"{guest.name}-{self._rng.randrange(20):02d}"
                # Nobody waits for the answer that another gets, so as many come as were meant to.
                _begin(self._ask(guest, profile, seconds, app), self._asking)
                asked += 1
            await asyncio.gather(*self._asking)
        finally:
            under_way = [*self._asking, *self._stays]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            for client in self._clients.values():
                await client.close()

    async def _ask(self, guest: Guest, profile: str, seconds: float, app: str) -> None:
        client = self._clients[guest.name]
        try:
            allocation = await client.allocate(
                profile,
                wait_seconds=guest.wait_seconds,
                priority=guest.priority,
                # For those who give back themselves it is long: should this process end early,
                # what it held is not held for ever.
                lease_seconds=seconds if guest.wait_seconds else 20 * self._mean_seconds,
                labels={"app": app},
            )
        except RejectedError as rejection:
            self.counts[f"rejected ({rejection.reason})"] += 1
            return
        except (ApiError, UnreachableError):
            self.counts["failed"] += 1
            return
        self.counts[allocation.state] += 1
        if not guest.wait_seconds:
            _begin(self._stay(client, allocation.id, seconds), self._stays)

    async def _stay(self, client: AsyncClient, identity: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        try:
            await client.release(identity)
        except (ApiError, UnreachableError):
            self.counts["failed"] += 1

    def summary(self) -> str:
        """What came of it so far, in a line."""
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return f"{self.counts.total()} requests: {counts or 'none yet'}"


def _begin(doing: Coroutine[None, None, None], under_way: set[asyncio.Task[None]]) -> None:
    """Do something beside all else; it is under way until it is done."""
    task = asyncio.create_task(doing)
    under_way.add(task)
    task.add_done_callback(under_way.discard)
