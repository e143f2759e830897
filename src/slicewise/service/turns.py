"""Fair turns on the event loop, and limits on what one caller has under way.

One thread answers all requests. Without turns, a caller with a hundred requests ready gets them all
answered before the one request of another caller. With turns, that request waits for a few
milliseconds of other callers' work, however many requests they have.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager

from slicewise.control.answers import RefusedError
from slicewise.control.fair_queue import FairQueue

SLICE_SECONDS = 0.001
"""Work on requests in one round of the event loop; what is left over waits for the next."""
MOST_AT_ONCE = 16
"""Turns granted in one round, however short they seem to be: each brings other work along, such as
reading the caller's next request."""
ALONE = 4
"""How much longer rounds are while a single caller has them: it waits for itself only."""
_MIXED_ROUNDS = 100
"""For how many rounds callers are taken to be several after another one has asked."""

_Future = asyncio.Future[None]


class Turns:
    """Shares each round of the event loop between callers.

    A caller takes a turn, then works without waiting. While a round has time left, a turn is
    granted at once, which costs a look at the timer. Otherwise callers queue up, and each further
    round grants as many turns as fit, in rotation.
    """

    def __init__(self, timer: Callable[[], float], slice_seconds: float = SLICE_SECONDS) -> None:
        self._timer = timer
        self._slice = slice_seconds
        self._queue: FairQueue[_Future] = FairQueue()
        self._begun = 0.0
        """When a turn was first taken in this round; 0 until then."""
        self._taken = 0
        """Turns taken in this round."""
        self._cost = slice_seconds
        """How long a turn takes, as seen recently."""
        self._last: Hashable = None
        """The caller that asked last."""
        self._mixed = 0
        """For how many rounds from here on callers are taken to be several."""

    def at_once(self, share: Hashable) -> bool:
        """Take a turn, if there is one without waiting."""
        if share != self._last:
            self._last, self._mixed = share, _MIXED_ROUNDS
        if not self._begun:
            self._begin()
        elif self._queue or self._timer() >= self._begun + self._length:
            return False
        self._taken += 1
        return True

    async def take(self, share: Hashable) -> None:
        """Return when it is this caller's turn."""
        if not self.at_once(share):
            turn: _Future = asyncio.get_running_loop().create_future()
            self._queue.append(share, turn)
            await turn

    @property
    def _length(self) -> float:
        """How long a round is."""
        return self._slice if self._mixed else ALONE * self._slice

    def _begin(self) -> None:
        self._begun = self._timer()
        asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        """Grant the turns of this round."""
        if self._taken:
            seen = (self._timer() - self._begun) / self._taken
            self._cost += (seen - self._cost) / 8
        self._begun, self._taken = 0.0, 0
        if self._mixed:
            self._mixed -= 1
        if not self._queue:
            return
        self._begin()
        most = MOST_AT_ONCE if self._mixed else ALONE * MOST_AT_ONCE
        fit = min(most, max(1, int(self._length / self._cost)))
        while self._queue and self._taken < fit:
            turn = self._queue.popleft()
            if not turn.done():  # its request may have been cancelled
                turn.set_result(None)
                self._taken += 1


class FairLock:
    """A lock that goes from caller to caller in rotation."""

    def __init__(self) -> None:
        self._queue: FairQueue[_Future] = FairQueue()
        self._held = False

    @asynccontextmanager
    async def hold(self, share: Hashable) -> AsyncIterator[None]:
        """Hold the lock."""
        if self._held:
            turn: _Future = asyncio.get_running_loop().create_future()
            self._queue.append(share, turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        self._held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Hand the lock to the next in turn, or let go of it."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._held = False


class Flights:
    """Limits what each caller has under way: requests, and bytes of answers it has not read."""

    def __init__(self, requests: int, unread: int, unread_in_all: int) -> None:
        self._most_requests = requests
        self._most_unread = unread
        self._most_in_all = unread_in_all
        self._requests: dict[Hashable, int] = {}
        self._unread: dict[Hashable, int] = {}
        self.unread = 0
        """Bytes of large answers that are being sent."""

    @property
    def requests(self) -> int:
        """Requests under way."""
        return sum(self._requests.values())

    def enter(self, share: Hashable) -> None:
        """Have a request under way, unless the caller has too many."""
        under_way = self._requests.get(share, 0)
        if under_way >= self._most_requests:
            raise RefusedError(
                429,
                f"more than {self._most_requests} requests of this caller are under way: wait for "
                "their answers first",
                retry_after=1,
            )
        self._requests[share] = under_way + 1

    def leave(self, share: Hashable) -> None:
        """A request is answered, or given up."""
        _subtract(self._requests, share, 1)

    def check_unread(self, share: Hashable, size: int) -> None:
        """Refuse an answer of this size if the caller has left too much unread.

        One answer may always be sent, however large it is.
        """
        unread = self._unread.get(share, 0)
        if unread and (unread + size > self._most_unread or self.unread + size > self._most_in_all):
            raise RefusedError(
                429,
                f"{unread:,} bytes of answers to this caller are unread: read them first",
                retry_after=1,
            )

    @contextmanager
    def answer(self, share: Hashable, size: int) -> Iterator[None]:
        """Send a large answer, unless the caller has left too much unread."""
        self.check_unread(share, size)
        self._unread[share] = self._unread.get(share, 0) + size
        self.unread += size
        try:
            yield
        finally:
            _subtract(self._unread, share, size)
            self.unread -= size


def _subtract(counts: dict[Hashable, int], share: Hashable, number: int) -> None:
    left = counts[share] - number
    if left:
        counts[share] = left
    else:
        del counts[share]
