"""The budget of moves: what a rescued request is worth, what a move costs, how long a plan may be.

A rescued request takes slices that later requests need. In a nearly full cluster the next large
request may be rejected instead, and the moves gain nothing. So a rescue is worth less than one
request: it falls with the size of the request and rises with the number of free slices. A move has
a price in the same unit, which falls as moves are saved: while few are saved, they are spent on
small requests that need one move. If the budget ends at some time, moves left over are lost, so
the price falls towards the end.

The figures were found by simulation: docs/defragmentation.md.
"""

from __future__ import annotations

import math

LOST_ALWAYS = 0.2
"""The number of later requests lost to a whole-GPU request, whatever is free."""

LOST_WHEN_FULL = 3.5
"""The number of later requests lost in a full cluster; fewer with free slices."""

NEARLY_FULL = 0.75
"""The loss in a full cluster falls to 1/e at this number times the square root of all slices free.

The square root, because demand fluctuates by about that much."""

DEAREST, CHEAPEST = 0.5, 0.02
"""The highest price of a move, with none saved, and the lowest, in requests."""

SAVED = 25
"""The price falls to 1/e with this many moves saved."""

THE_END = 300
"""Arrivals still counted as to come when a budget ends, which bounds the fall of the price."""

LONGEST_PLAN = 6
"""The most moves of a plan."""


def worth(size: int, gpu: int, free: int, slices: int) -> float:
    """The value of placing a request of ``size`` slices, in requests; may be negative.

    ``gpu`` is the slices of one GPU, ``free`` and ``slices`` those of the cluster.
    """
    nearly = NEARLY_FULL * math.sqrt(slices)
    lost = LOST_WHEN_FULL * (math.exp((size - free) / nearly) - math.exp(-free / nearly))
    return 1 - LOST_ALWAYS * size / gpu - lost


class MoveBudget:
    """Moves earned and not yet spent: every arrival earns a share of one."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._arrivals = self._spent = 0
        self._last = math.inf
        self._end = math.inf
        """The number of arrivals after which the budget ends."""

    def earn(self) -> None:
        """Count an arrival."""
        self._arrivals += 1

    def spend(self, moves: int) -> None:
        """Count moves that were made."""
        self._spent += moves

    def confine(self, arrivals: int) -> None:
        """From now on, spend at most what the next ``arrivals`` earn, whatever is saved."""
        self._last = self._spent + self._share * arrivals
        self._end = self._arrivals + arrivals

    @property
    def saved(self) -> float:
        """The moves that could be made now, fractions included."""
        # Without the margin, fifty arrivals at 0.02 would not always be a whole move.
        return min(self._share * self._arrivals, self._last) - self._spent + 1e-9

    @property
    def price(self) -> float:
        """The current price of a move, in requests."""
        if not self._share:
            return DEAREST
        to_come = self._share * (max(self._end - self._arrivals, 0) + THE_END)
        plenty = self.saved / SAVED + self.saved / to_come
        return max(DEAREST * math.exp(-plenty), CHEAPEST)

    def longest_plan(self, gain: float) -> int:
        """The most moves of a plan whose gain is ``gain`` requests."""
        return max(0, min(int(self.saved), int(gain / self.price), LONGEST_PLAN))
