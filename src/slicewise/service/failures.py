"""Failed authentications: counted, logged in summary, and answered slowly when there are many.

A valid token is never held up by what others behind the same address do: only the answer to a
request that has none is delayed.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from slicewise.control.actors import Failure, UnauthenticatedError
from slicewise.control.answers import RefusedError
from slicewise.service.addresses import block_of
from slicewise.service.logs import logger
from slicewise.service.rates import Limits

log = logger("slicewise.authentication")

DELAY_SECONDS = 1.0
"""How long the answer to a request beyond the limit takes: a client gets no further meanwhile."""
_MOST_DELAYED = 512
"""Answers that are held back at a time; more are sent at once."""
_ADDRESSES = 1000
"""Clients counted one by one between two summaries; further ones are counted together."""
_LINES = 20
"""Clients that have a line of their own in a summary, those with the most failures."""


class Failures:
    """Keeps count of those who come without a valid token."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.by_reason: Counter[Failure] = Counter()
        """Since the process began."""
        self._by_address: dict[str, Counter[Failure]] = {}
        self._others = 0
        self._delayed = 0

    async def note(self, address: str, refusal: UnauthenticatedError) -> RefusedError:
        """Count a failure; returns the answer to it, once it is time to give it."""
        self.by_reason[refusal.why] += 1
        block = block_of(address)
        counts = self._by_address.get(block)
        if counts is None and len(self._by_address) < _ADDRESSES:
            counts = self._by_address[block] = Counter()
        if counts is None:
            self._others += 1
        else:
            counts[refusal.why] += 1
        wait = self._limits.stranger(block)
        if not wait:
            return refusal
        if self._delayed < _MOST_DELAYED:
            self._delayed += 1
            try:
                await asyncio.sleep(DELAY_SECONDS)
            finally:
                self._delayed -= 1
        return RefusedError(
            429, "too many requests without a valid token come from this address", retry_after=wait
        )

    def summarize(self) -> None:
        """Log what has failed since the last summary, at most a few lines of it."""
        counted, self._by_address = self._by_address, {}
        others, self._others = self._others, 0
        most = sorted(counted.items(), key=lambda item: -item[1].total())
        for address, reasons in most[:_LINES]:
            log.warning(
                "authentication failed",
                address=address or "unknown",
                count=reasons.total(),
                **{str(why): number for why, number in reasons.items()},
            )
        others += sum(reasons.total() for _, reasons in most[_LINES:])
        if others:
            log.warning("authentication failed", address="others", count=others)
