"""The record: every call that was made, what was answered, and in which order all that happened.

One counter stamps both ends of a call. A call whose answer was stamped before another one was
made came first, in whatever order the service did its work.
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
"""The label by which an allocation tells whose key made it."""


class Kind(StrEnum):
    """What was asked for."""

    CREATE = "create"
    BATCH = "batch"
    RELEASE = "release"
    TURN = "turn"
    """Cordon or uncordon a node."""
    MOVE = "move"
    """Make planned moves."""
    GET = "get"
    CLUSTER = "cluster"


READS = frozenset({Kind.GET, Kind.CLUSTER})
KEYED = frozenset({Kind.CREATE, Kind.BATCH, Kind.RELEASE})
"""Those that bear an idempotency key."""


@dataclass(slots=True)
class Call:
    """One call, however often it had to be sent."""

    actor: str
    """The id of the token that asked: the name the journal has for the client."""
    tenant: str
    kind: Kind
    key: str
    method: str
    path: str
    body: bytes
    invoked: int
    subject: str = ""
    """The allocation or node it is about, if that was known before."""
    answered: int | None = None
    """None: nobody knows what became of it."""
    status: int = 0
    answer: bytes = b""
    sent: int = 0
    replayed: bool = False
    """Whether the answer was one that had been given before."""
    lagging: bool = False
    """Whether it was a process that follows, or may, that was asked."""

    @property
    def known(self) -> bool:
        """Whether it was answered."""
        return self.answered is not None

    def said(self) -> Any:
        """The answer, as it stands in the body."""
        return msgspec.json.decode(self.answer)


@dataclass
class Record:
    """All calls in the order they were made."""

    calls: list[Call] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    """Answers that no call should ever get."""
    statuses: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    """How often a call had to be sent again, and why."""
    _stamps: itertools.count[int] = field(default_factory=itertools.count)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    answers: int = 0

    def stamp(self) -> int:
        """The next moment."""
        return next(self._stamps)

    def invoke(self, call: Call) -> Call:
        """Take down a call that is about to be made."""
        self.calls.append(call)
        return call

    def settle(self, call: Call, status: int, answer: bytes, replayed: bool) -> None:
        """Take down what was answered."""
        call.answered = self.stamp()
        call.status, call.answer, call.replayed = status, answer, replayed
        self.statuses[f"{call.kind} {status}"] += 1
        self.answers += 1
        self._news.set()

    def trouble(self, what: str) -> None:
        """Take down why a call has to be sent again."""
        self.troubles[what] += 1
        self._news.set()

    @property
    def turned_away(self) -> int:
        """How often a call was answered that it cannot be done now."""
        return sum(count for what, count in self.troubles.items() if what.startswith("503 "))

    async def reach(self, answers: int) -> None:
        """Wait until so many calls have been answered."""
        await self._until(lambda: self.answers >= answers)

    async def reach_trouble(self, turned_away: int) -> None:
        """Wait until calls have been turned away so often."""
        await self._until(lambda: self.turned_away >= turned_away)

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for it, unless calls are answered no more: then it would be in vain."""
        answers, give_up = self.answers, time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if self.answers > answers:
                answers, give_up = self.answers, time.monotonic() + PATIENCE_SECONDS
            if time.monotonic() > give_up:
                raise AssertionError(
                    f"no call is answered any more: {self.troubles.most_common(9)}"
                )
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1.0)

    @property
    def unknown(self) -> list[Call]:
        """The calls of which nobody knows what became."""
        return [call for call in self.calls if not call.known]
