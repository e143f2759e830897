"""Live traffic: tenants who come, ask, hold what they get for a while, and give it back.

Arrivals are as in the steady experiment, only in real time and through the service's front door.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping

from slicewise.client import ApiError, AsyncClient, RejectedError, UnreachableError
from slicewise.demo.scene import GUESTS, Guest


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
        self._stays: set[asyncio.Task[None]] = set()

    async def run(self, requests: int | None = None) -> None:
        """Go on for ever, or for so many requests; nobody comes or goes after that."""
        try:
            while requests is None or self.counts.total() < requests:
                await asyncio.sleep(self._rng.expovariate(self._per_second))
                guest = self._rng.choices(GUESTS, [guest.share for guest in GUESTS])[0]
                await self._ask(guest)
        finally:
            for stay in self._stays:
                stay.cancel()
            await asyncio.gather(*self._stays, return_exceptions=True)
            for client in self._clients.values():
                await client.close()

    async def _ask(self, guest: Guest) -> None:
        client = self._clients[guest.name]
        profile = self._rng.choices(list(guest.likes), list(guest.likes.values()))[0]
        seconds = 0.1 + self._rng.expovariate(1 / self._mean_seconds)
        try:
            allocation = await client.allocate(
                profile,
                wait_seconds=guest.wait_seconds,
                priority=guest.priority,
                # For those who give back themselves it is long: should this process end early,
                # what it held is not held for ever.
                lease_seconds=seconds if guest.wait_seconds else 20 * self._mean_seconds,
                labels={"app": f"{guest.name}-{self._rng.randrange(20):02d}"},
            )
        except RejectedError as rejection:
            self.counts[f"rejected ({rejection.reason})"] += 1
            return
        except (ApiError, UnreachableError):
            self.counts["failed"] += 1
            return
        self.counts[allocation.state] += 1
        if not guest.wait_seconds:
            stay = asyncio.create_task(self._stay(client, allocation.id, seconds))
            self._stays.add(stay)
            stay.add_done_callback(self._stays.discard)

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
