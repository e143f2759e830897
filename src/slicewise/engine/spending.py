"""Spending a budget of moves: what a rescue is worth, what a move costs, how long a plan may be.

A request that is rescued takes slices that others will ask for. In a cluster that is nearly full
the next large request may be turned away in its place, and the moves were made for nothing. So a
rescue is worth less than one request, and the less, the larger the request and the fewer the free
slices. A move has a price in the same unit, which falls as moves are saved: while few are left,
they go to rescues of one move, and to small requests. Where the budget has an end, what is left
then is worth nothing, so it counts the more the nearer the end is.

The figures were found by simulation: docs/defragmentation.md.
"""

from __future__ import annotations

import math

LOST_ALWAYS = 0.2
"""Of later requests, how many are lost to one for a whole GPU, however much is free."""

LOST_WHEN_FULL = 3.5
"""How many later requests a full cluster loses; with free slices less, see `NEARLY_FULL`."""

NEARLY_FULL = 0.75
"""That loss falls to a third for as many free slices as this times the root of all slices.

The root, because demand goes up and down by about as much."""

DEAREST, CHEAPEST = 0.5, 0.02
"""The price of a move when none is saved, and the lowest, in requests."""

SAVED = 25
"""The price falls to a third for so many moves saved."""

THE_END = 300
"""Arrivals that are counted as still to come when a budget ends: so far the price falls."""

LONGEST_PLAN = 6
"""A plan never has more moves than this."""


def worth(size: int, gpu: int, free: int, slices: int) -> float:
    """What placing a request of so many slices saves in the end, in requests; may be negative.

    ``gpu`` is the slices of one GPU, ``free`` and ``slices`` those of the cluster.
    """
    nearly = NEARLY_FULL * math.sqrt(slices)
    lost = LOST_WHEN_FULL * (math.exp((size - free) / nearly) - math.exp(-free / nearly))
    return 1 - LOST_ALWAYS * size / gpu - lost


class Budget:
    """Moves earned and not yet spent: every arrival earns a share of one."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._arrivals = self._spent = 0
        self._last = math.inf
        self._end = math.inf
        """After so many arrivals the budget ends, if it does."""

    def earn(self) -> None:
        """An arrival."""
        self._arrivals += 1

    def spend(self, moves: int) -> None:
        """Moves were made."""
        self._spent += moves

    def confine(self, arrivals: int) -> None:
        """From now on, do not spend more than the next so many arrivals earn, whatever is saved."""
        self._last = self._spent + self._share * arrivals
        self._end = self._arrivals + arrivals

    @property
    def saved(self) -> float:
        """Moves that could be made now; what is left of the last one is not rounded."""
        # Without the margin, fifty arrivals at 0.02 would not always be a whole move.
        return min(self._share * self._arrivals, self._last) - self._spent + 1e-9

    @property
    def price(self) -> float:
        """What a move costs now, in requests."""
        if not self._share:
            return DEAREST
        to_come = self._share * (max(self._end - self._arrivals, 0) + THE_END)
        plenty = self.saved / SAVED + self.saved / to_come
        return max(DEAREST * math.exp(-plenty), CHEAPEST)

    def longest_plan(self, gain: float) -> int:
        """How many moves a plan may have now that saves so many requests."""
        return max(0, min(int(self.saved), int(gain / self.price), LONGEST_PLAN))
