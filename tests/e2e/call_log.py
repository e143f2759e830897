"""The call log: every call, its answer, and the order of both.

One counter stamps the start and the end of each call. If a call ended before another one started,
it happened first.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
from tests.e2e.server import PATIENCE_SECONDS

LABEL = "call"
"""The label with the key of the call that created an allocation."""


class Kind(StrEnum):
    """The kind of a call."""

    CREATE = "create"
    BATCH = "batch"
    RELEASE = "release"
    CORDON = "cordon"
    """Cordon or uncordon a node."""
    MOVE = "move"
    """Carry out planned moves."""
    GET = "get"
    CLUSTER = "cluster"


READS = frozenset({Kind.GET, Kind.CLUSTER})
KEYED = frozenset({Kind.CREATE, Kind.BATCH, Kind.RELEASE})
"""Calls that carry an idempotency key."""


@dataclass(slots=True)
class Call:
    """One call, regardless of how often it was sent."""

    actor: str
    """The id of the client's token, which is the actor in the journal."""
    tenant: str
    kind: Kind
    key: str
    method: str
    path: str
    body: bytes
    invoked: int
    subject: str = ""
    """The allocation or node that the call is about, if known in advance."""
    answered: int | None = None
    """None if the outcome is unknown."""
    status: int = 0
    answer: bytes = b""
    sent: int = 0
    replayed: bool = False
    """Whether the answer was replayed by its idempotency key."""
    lagging: bool = False
    """Whether a follower may have answered."""

    @property
    def known(self) -> bool:
        """Whether the call was answered."""
        return self.answered is not None

    def decoded(self) -> Any:
        """The decoded body of the answer."""
        return msgspec.json.decode(self.answer)


@dataclass
class CallLog:
    """All calls in the order they were made."""

    calls: list[Call] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    """Answers that no call should ever get."""
    statuses: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    """How often calls had to be sent again, by reason."""
    _stamps: itertools.count[int] = field(default_factory=itertools.count)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    answers: int = 0

    def stamp(self) -> int:
        """Return the next timestamp."""
        return next(self._stamps)

    def invoke(self, call: Call) -> Call:
        """Record a call before it is sent."""
        self.calls.append(call)
        return call

    def settle(self, call: Call, status: int, answer: bytes, replayed: bool) -> None:
        """Record the answer of a call."""
        call.answered = self.stamp()
        call.status, call.answer, call.replayed = status, answer, replayed
        self.statuses[f"{call.kind} {status}"] += 1
        self.answers += 1
        self._news.set()

    def record_retry(self, what: str) -> None:
        """Record why a call has to be sent again."""
        self.retries[what] += 1
        self._news.set()

    @property
    def refusals(self) -> int:
        """The number of 503 answers."""
        return sum(count for what, count in self.retries.items() if what.startswith("503 "))

    async def wait_for_answers(self, answers: int) -> None:
        """Wait until this many calls have been answered."""
        await self._until(lambda: self.answers >= answers)

    async def wait_for_refusals(self, refusals: int) -> None:
        """Wait for this many 503 answers."""
        await self._until(lambda: self.refusals >= refusals)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; fail if no more calls are answered."""
        answers, give_up = self.answers, time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.answers > answers:
                answers, give_up = self.answers, time.monotonic() + PATIENCE_SECONDS
            if time.monotonic() > give_up:
                raise AssertionError(f"calls are no longer answered: {self.retries.most_common(9)}")
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1.0)

    @property
    def unknown(self) -> list[Call]:
        """The calls with an unknown outcome."""
        return [call for call in self.calls if not call.known]
