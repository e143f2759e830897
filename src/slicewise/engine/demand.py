"""What is asked for, how often, and how long it stays: an estimate from what was seen.

Every request counts, placed or not. Counts fade with later requests, not with time: the estimate
is about the last thousand requests or, in a large cluster, about as many as run at once. So it
needs no clock and no unit of time, and an idle night changes nothing.

A shorter window is compared with the long one. If what they hold differs by more than chance, the
demand has changed, and the long window begins again with what the short one holds.

The same calls in the same order give the same estimate. `data` has all of it as plain values, from
which `DemandEstimate.of` continues exactly.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from typing import NamedTuple

from slicewise.core.request import Request

WINDOW = 1000
"""The requests that the estimate is about, unless more than that run at once."""

SHORT = 0.15
"""The length of the short window, in long ones."""

FEW = 300
"""No change is detected in fewer requests than this since the last one."""

_EVERY = 20
"""The requests between two comparisons of the windows."""

_SURE = 4.5
"""A change is a difference with so many standard deviations' chance: about 3 in a million."""

_FORGOTTEN_AFTER = 50
"""A request counts as never asked for once it was not asked for in so many windows."""

_MOST_REQUESTS = 64
"""The limit on kinds of request: tenants choose them, so memory must be bounded."""

_KEEP = 1 - 1 / WINDOW
"""What a lifetime still counts when the next one was seen."""

_TINY = 1e-300

_MOST_STAYS = 1000
"""The number of the latest lifetimes that are kept."""


class Stay(NamedTuple):
    """How long an instance stayed, and how long it was to stay as far as that was said."""

    profile: str
    lifetime: float
    stated: float | None


@dataclass(slots=True)
class AskedFor:
    """One kind of request, and its share of both windows as weights."""

    request: Request
    long: float
    short: float
    last: int
    """How many requests there were when it was last asked for."""


@dataclass(slots=True)
class Windows:
    """What both windows hold apart from the requests themselves."""

    long: float = 0.0
    """The weight of all requests."""
    short: float = 0.0
    long_time: float = 0.0
    """The weight of the times between requests."""
    short_time: float = 0.0
    long_square: float = 0.0
    """Sums of squared weights, from which the variance of a share follows."""
    short_square: float = 0.0
    product: float = 0.0
    stays: float = 0.0
    """The weight of the lifetimes seen, and of the instances that had them."""
    instances: float = 0.0


@dataclass(frozen=True, slots=True)
class DemandData:
    """An estimate as plain values."""

    requests: int = 0
    changes: int = 0
    changed_at: int = 0
    at: float = 0.0
    asked_for: tuple[AskedFor, ...] = ()
    windows: Windows = field(default_factory=Windows)
    stays: tuple[Stay, ...] = ()


class DemandEstimate:
    """The mix of requests, their rate and their lifetimes."""

    def __init__(self) -> None:
        self.requests = 0
        """All requests so far."""
        self.changes = 0
        """How often the demand has changed."""
        self._changed_at = 0
        self._at = 0.0
        self._asked: dict[Request, AskedFor] = {}
        self._windows = Windows()
        self._stays: deque[Stay] = deque(maxlen=_MOST_STAYS)

    @classmethod
    def of(cls, data: DemandData) -> DemandEstimate:
        """Return the estimate that these data describe."""
        made = cls()
        made.requests, made.changes, made._changed_at = data.requests, data.changes, data.changed_at
        made._at = data.at
        made._asked = {each.request: _copy(each) for each in data.asked_for}
        made._windows = Windows(*astuple(data.windows))
        made._stays.extend(data.stays)
        return made

    def data(self) -> DemandData:
        """Return all of the estimate as plain values."""
        return DemandData(
            self.requests,
            self.changes,
            self._changed_at,
            self._at,
            tuple(_copy(each) for each in self._asked.values()),
            Windows(*astuple(self._windows)),
            tuple(self._stays),
        )

    # What happens

    def asked(self, at: float, request: Request, count: int = 1) -> None:
        """Count a request for so many instances, whatever became of it.

        Requests of the same kind are to be equal, and some GPU of the cluster is to offer them.
        """
        windows = self._windows
        long = max(float(WINDOW), self.running)
        short = SHORT * long
        keep_long, keep_short = 1 - 1 / long, 1 - 1 / short
        if count != 1:
            keep_long, keep_short = keep_long**count, keep_short**count
        for each in self._asked.values():
            each.long *= keep_long
            each.short *= keep_short
        now = max(at, self._at)
        gap = now - self._at if self.requests else 0.0
        self._at = now
        self.requests += count
        entry = self._asked.get(request)
        if entry is None:
            entry = self._asked[request] = AskedFor(request, 0.0, 0.0, 0)
        entry.last = self.requests
        # A request for many instances is as many requests, and yet one observation.
        more_long, more_short = (1 - keep_long) * long, (1 - keep_short) * short
        entry.long += more_long
        entry.short += more_short
        windows.long = windows.long * keep_long + more_long
        windows.short = windows.short * keep_short + more_short
        windows.long_time = windows.long_time * keep_long + gap
        windows.short_time = windows.short_time * keep_short + gap
        windows.long_square = windows.long_square * keep_long * keep_long + more_long * more_long
        windows.short_square = (
            windows.short_square * keep_short * keep_short + more_short * more_short
        )
        windows.product = windows.product * keep_long * keep_short + more_long * more_short
        if len(self._asked) > _MOST_REQUESTS:
            del self._asked[min(self._asked.values(), key=lambda each: each.last).request]
        if self.requests // _EVERY != (self.requests - count) // _EVERY:
            self._compare(long)

    def ended(self, profile: str, lifetime: float, stated: float | None = None) -> None:
        """Count the end of an instance; ``stated`` is the lifetime that its request announced."""
        windows = self._windows
        lifetime = max(lifetime, 0.0)
        windows.stays = windows.stays * _KEEP + lifetime
        windows.instances = windows.instances * _KEEP + 1
        self._stays.append(Stay(profile, lifetime, stated))

    # What it says

    @property
    def steady_for(self) -> int:
        """The requests since the demand changed last."""
        return self.requests - self._changed_at

    @property
    def asked_for(self) -> tuple[Request, ...]:
        """The requests that were asked for, also rare ones, in order of their first appearance."""
        return tuple(self._asked)

    @property
    def shares(self) -> dict[Request, float]:
        """The share of each kind of request."""
        total = math.fsum(each.long for each in self._asked.values())
        return {each.request: each.long / total for each in self._asked.values()}

    @property
    def rate(self) -> float:
        """Requests in a unit of time; 0 while it is unknown."""
        windows = self._windows
        return windows.long / windows.long_time if windows.long_time else 0.0

    @property
    def mean_lifetime(self) -> float:
        """The mean lifetime of the instances that have ended; 0 while it is unknown."""
        windows = self._windows
        return windows.stays / windows.instances if windows.instances else 0.0

    @property
    def running(self) -> float:
        """How many instances would run on average if none were rejected (Little's law)."""
        windows = self._windows
        if not windows.long_time or not windows.instances:
            return 0.0
        return windows.long / windows.long_time * (windows.stays / windows.instances)

    @property
    def stays(self) -> tuple[Stay, ...]:
        """The latest lifetimes, oldest first."""
        return tuple(self._stays)

    def stays_of(self, profiles: Iterable[str], least: int = 30) -> tuple[Stay, ...]:
        """Return the latest lifetimes of some profiles; those of all if there are too few."""
        wanted = frozenset(profiles)
        found = tuple(stay for stay in self._stays if stay.profile in wanted)
        return found if len(found) >= least else self.stays

    # Windows

    def _compare(self, length: float) -> None:
        """Forget what is too old, and begin again if the demand has changed."""
        oldest = self.requests - _FORGOTTEN_AFTER * length
        for each in [each for each in self._asked.values() if each.last < oldest]:
            del self._asked[each.request]
        if self.steady_for < FEW or not self._differs():
            return
        self.changes += 1
        self._changed_at = self.requests
        windows = self._windows
        for each in self._asked.values():
            each.long = each.short
        windows.long, windows.long_time = windows.short, windows.short_time
        windows.long_square = windows.product = windows.short_square

    def _differs(self) -> bool:
        """Return whether the windows differ by more than chance, by the chi-squared test."""
        windows = self._windows
        long, short = windows.long, windows.short
        variance = (
            windows.long_square / long**2
            + windows.short_square / short**2
            - 2 * windows.product / (long * short)
        )
        kinds = len(self._asked) - 1
        if kinds < 1 or variance <= 0:
            return False
        distance = 0.0
        for each in self._asked.values():
            before, now = each.long / long, each.short / short
            distance += 2 * (now - before) ** 2 / max(now + before, _TINY)
        # The quantile of the chi-squared distribution, after Wilson and Hilferty.
        spread = 2 / (9 * kinds)
        return distance / variance > kinds * (1 - spread + _SURE * math.sqrt(spread)) ** 3


def _copy(entry: AskedFor) -> AskedFor:
    return AskedFor(entry.request, entry.long, entry.short, entry.last)
