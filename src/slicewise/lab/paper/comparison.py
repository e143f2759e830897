"""Compares our results with the published figures, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slicewise.lab.paper.published import RATIO, REFERENCE, Published, published

Row = Mapping[str, Any]
"""A row of results: plain values, with the interval of a figure as ``..._ci95``."""

_SAME_DEMAND = 1e-6
_ROUNDING = 1e-9
"""Tolerance with which a difference of exactly the margin counts as within it."""
_AVERAGED = "fragmentation"
"""The quantity that is compared as a mean over all demand rows, not at one of them."""


@dataclass(frozen=True)
class Quantity:
    """A figure of the paper, and the difference that still counts as agreement."""

    key: str
    """The column of the results."""
    title: str
    description: str
    margin: float
    relative: float = 0.0
    """A share of the published value that is allowed instead if it is larger."""
    decimals: int = 3
    unit: str = ""

    @property
    def anchor(self) -> str:
        """The id of its section in the report."""
        return "table-" + self.key.replace("_", "-")

    @property
    def margin_text(self) -> str:
        """The margin for people to read."""
        text = f"{self.margin:g}{' points' if self.unit == '%' else ''}"
        if not self.relative:
            return text
        return f"{text} or {100 * self.relative:g}% of the published value, whichever is more"

    def within(self, published: float, ours: float, margin: float | None = None) -> bool:
        """Return whether two values agree, by the margin of the quantity unless one is given."""
        if margin is None:
            margin = max(self.margin, self.relative * abs(published))
        return abs(ours - published) <= margin + _ROUNDING

    def text(self, value: float) -> str:
        """Format a value with its significant digits."""
        return f"{value:.{self.decimals}f}"


QUANTITIES = (
    Quantity(
        "acceptance_rate",
        "Acceptance rate",
        "The share of the requests in the row that were placed.",
        margin=0.04,
    ),
    Quantity(
        RATIO,
        "Scheduled workloads relative to MFI",
        "The requests placed so far, divided by those that MFI placed of the same arrivals.",
        margin=0.06,
    ),
    Quantity(
        "utilization_percent",
        "Utilization",
        "The memory slices in use, in %.",
        margin=3,
        decimals=1,
        unit="%",
    ),
    Quantity(
        "active_gpus_percent",
        "Active GPUs",
        "The GPUs with at least one instance, in %.",
        margin=6,
        decimals=1,
        unit="%",
    ),
    Quantity(
        "fragmentation",
        "Fragmentation",
        "The score F, averaged over all GPUs and over all demand rows.",
        margin=0.1,
        relative=0.25,
    ),
)
"""In the order of the report."""


@dataclass(frozen=True)
class Cell:
    """One number of the paper and our number for the same quantity, distribution and policy."""

    quantity: Quantity
    distribution: str
    policy: str
    published: float
    ours: float
    interval: tuple[float, float] | None
    """The 95% interval of our number; None if there were too few runs for one."""

    @property
    def figure(self) -> str:
        """The column of the results."""
        return self.quantity.key

    @property
    def difference(self) -> float:
        """Our value minus the published one."""
        return self.ours - self.published

    @property
    def signed_difference(self) -> str:
        """The difference with its sign, for tables."""
        size = self.text(abs(self.difference))
        if not float(size):
            return size
        return ("+" if self.difference > 0 else "\N{MINUS SIGN}") + size

    @property
    def half_interval(self) -> float | None:
        """Half the width of the interval."""
        return None if self.interval is None else (self.interval[1] - self.interval[0]) / 2

    @property
    def within(self) -> bool:
        """Whether the difference is within the margin of its quantity."""
        return self.quantity.within(self.published, self.ours)

    @property
    def is_reference(self) -> bool:
        """Whether both values are 1 by definition: MFI relative to itself."""
        return self.figure == RATIO and self.policy == REFERENCE

    def text(self, value: float) -> str:
        """Format a value of this quantity."""
        return self.quantity.text(value)


@dataclass(frozen=True)
class Comparison:
    """Every number that is both in the paper and in our results."""

    cells: tuple[Cell, ...]

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The quantities that have cells, in the order of the report."""
        present = {cell.figure for cell in self.cells}
        return tuple(quantity for quantity in QUANTITIES if quantity.key in present)

    def of(self, figure: str) -> tuple[Cell, ...]:
        """Return the cells of one quantity."""
        return tuple(cell for cell in self.cells if cell.figure == figure)

    def by_distribution(self, figure: str) -> dict[str, list[Cell]]:
        """Return the cells of one quantity, grouped by distribution."""
        groups: dict[str, list[Cell]] = {}
        for cell in self.of(figure):
            groups.setdefault(cell.distribution, []).append(cell)
        return groups

    def judged(self, figure: str) -> tuple[Cell, ...]:
        """Return the cells of one quantity that can differ: all but MFI relative to itself."""
        return tuple(cell for cell in self.of(figure) if not cell.is_reference)


def compare(
    results: Iterable[Row], fragmentation: Iterable[Row], paper: Published | None = None
) -> Comparison:
    """Compare results with the published figures; numbers that only one side has are skipped.

    ``results`` has a row per distribution, policy and demand; ``fragmentation`` has one per
    distribution and policy.
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
