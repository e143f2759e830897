"""Ours beside the published figures, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slicewise.paper.published import RATIO, REFERENCE, Published, published
from slicewise.paper.quantities import QUANTITIES, Quantity

Row = Mapping[str, Any]
"""A line of results: plain values, with an interval beside a figure as ``..._ci95``."""

_SAME_DEMAND = 1e-6
_AVERAGED = "fragmentation"
"""The quantity that is compared averaged over all demand rows, not at one of them."""


@dataclass(frozen=True)
class Cell:
    """One number of the paper and ours for the same thing."""

    quantity: Quantity
    distribution: str
    policy: str
    published: float
    ours: float
    interval: tuple[float, float] | None
    """The 95% interval of ours; None when there were too few runs for one."""

    @property
    def figure(self) -> str:
        """The name of the quantity, as in the results."""
        return self.quantity.key

    @property
    def difference(self) -> float:
        """How far ours is above the published value."""
        return self.ours - self.published

    @property
    def within(self) -> bool:
        """Whether the difference is within the margin of its quantity."""
        return self.quantity.within(self.published, self.ours)

    @property
    def is_reference(self) -> bool:
        """Whether both values are 1 by definition: MFI relative to itself."""
        return self.figure == RATIO and self.policy == REFERENCE


@dataclass(frozen=True)
class Comparison:
    """Every number that both the paper and we have."""

    cells: tuple[Cell, ...]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """What could be compared, in the order in which it is shown."""
        present = {cell.figure for cell in self.cells}
        return tuple(quantity for quantity in QUANTITIES if quantity.key in present)

    def of(self, figure: str) -> tuple[Cell, ...]:
        """The cells of one quantity."""
        return tuple(cell for cell in self.cells if cell.figure == figure)

    def judged(self, figure: str) -> tuple[Cell, ...]:
        """The cells of one quantity that can agree or not: all but MFI relative to itself."""
        return tuple(cell for cell in self.of(figure) if not cell.is_reference)


def compare(
    results: Iterable[Row], fragmentation: Iterable[Row], paper: Published | None = None
) -> Comparison:
    """Hold results against the published figures.

    ``results`` has a row per distribution, policy and demand; ``fragmentation`` a row per
    distribution and policy. Whatever only one side has is left out.
    """
    paper = paper or published()
    at_demand = [row for row in results if abs(row["demand"] - paper.demand) < _SAME_DEMAND]
    averaged = list(fragmentation)
    cells: list[Cell] = []
    for quantity in QUANTITIES:
        rows = averaged if quantity.key == _AVERAGED else at_demand
        cells += _cells(quantity, rows, paper)
    return Comparison(tuple(cells))


def _cells(quantity: Quantity, rows: Sequence[Row], paper: Published) -> list[Cell]:
    ours = {(row["distribution"], row["policy"]): row for row in rows}
    cells: list[Cell] = []
    for distribution, by_policy in paper.figures[quantity.key].items():
        for policy, value in by_policy.items():
            row = ours.get((distribution, policy))
            number = None if row is None else row.get(quantity.key)
            if row is None or number is None or not math.isfinite(number):
                continue
            interval = row.get(f"{quantity.key}_ci95")
            cells.append(
                Cell(
                    quantity,
                    distribution,
                    policy,
                    published=value,
                    ours=float(number),
                    interval=None if interval is None else (interval[0], interval[1]),
                )
            )
    return cells
