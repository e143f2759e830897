"""Compares our results with the published figures, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slicewise.lab.paper.published import RATIO, REFERENCE, PublishedFigures, published

Row = Mapping[str, Any]
"""A row of results: plain values, with the interval of a figure as ``..._ci95``."""

_SAME_DEMAND = 1e-6
_ROUNDING = 1e-9
"""Tolerance with which a difference of exactly the margin counts as within it."""
_DECIMALS = 3
"""As many as the published shares of active GPUs have."""
_AVERAGED = "fragmentation"
"""The quantity that is compared as a mean over all demand rows, not at one of them."""


@dataclass(frozen=True)
class Quantity:
    """A figure of the paper, and the difference that still counts as agreement."""

    key: str
    """The column of the results."""
    title: str
    description: str
    margin: float = 0.0
    relative: float = 0.0
    """The margin as a share of the published value, where that is what counts."""
    unit: str = ""

    @property
    def anchor(self) -> str:
        """The id of its section in the report."""
        return "table-" + self.key.replace("_", "-")

    @property
    def margin_text(self) -> str:
        """The margin for people to read."""
        if self.relative:
            return f"{100 * self.relative:g}% of the published value"
        unit = "point" if self.margin == 1 else "points"
        return f"{self.margin:g}{f' {unit}' if self.unit == '%' else ''}"

    def within(self, published: float, ours: float) -> bool:
        """Return whether two values agree."""
        margin = max(self.margin, self.relative * abs(published))
        return abs(ours - published) <= margin + _ROUNDING

    def text(self, value: float) -> str:
        """Format a value."""
        return f"{value:.{_DECIMALS}f}"


QUANTITIES = (
    Quantity(
        "acceptance_rate",
        "Acceptance rate",
        "The share of the requests in the row that were placed.",
        margin=0.02,
    ),
    Quantity(
        RATIO,
        "Scheduled workloads relative to MFI",
        "The requests placed so far, divided by those that MFI placed of the same arrivals.",
        margin=0.015,
    ),
    Quantity(
        "utilization_percent",
        "Utilization",
        "The slices in use, in %: memory slices, or the mean of compute and memory.",
        margin=1,
        unit="%",
    ),
    Quantity(
        "active_gpus_percent",
        "Active GPUs",
        "The GPUs with at least one instance, in %.",
        margin=1.5,
        unit="%",
    ),
    Quantity(
        "fragmentation",
        "Fragmentation",
        "The mean score F of a run: over all GPUs and rows, or over active GPUs and slots.",
        relative=0.15,
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
    def agreeing(self) -> int:
        """The number of figures within their margin."""
        return sum(cell.within for cell in self.cells)

    @property
    def quantities(self) -> tuple[Quantity, ...]:
        """The quantities that have cells, in the order of the report."""
        present = {cell.figure for cell in self.cells}
        return tuple(quantity for quantity in QUANTITIES if quantity.key in present)

    def of(self, figure: str) -> tuple[Cell, ...]:
        """Return the cells of one quantity."""
        return tuple(cell for cell in self.cells if cell.figure == figure)

    def judged(self, figure: str) -> tuple[Cell, ...]:
        """Return the cells of one quantity that can differ: all but MFI relative to itself."""
        return tuple(cell for cell in self.of(figure) if not cell.is_reference)


@dataclass(frozen=True)
class SideBySide:
    """One number of the paper, and our number for it under each reading that has one."""

    quantity: Quantity
    distribution: str
    policy: str
    published: float
    cells: Mapping[str, Cell]
    """By the name of the reading."""

    @property
    def is_reference(self) -> bool:
        """Whether all values are 1 by definition."""
        return any(cell.is_reference for cell in self.cells.values())


def side_by_side(comparisons: Mapping[str, Comparison]) -> tuple[SideBySide, ...]:
    """Return every compared number once, in the order of the report."""
    found: dict[tuple[int, str, str], dict[str, Cell]] = {}
    for name, comparison in comparisons.items():
        for cell in comparison.cells:
            key = QUANTITIES.index(cell.quantity), cell.distribution, cell.policy
            found.setdefault(key, {})[name] = cell
    lines: list[SideBySide] = []
    for (quantity, distribution, policy), cells in sorted(found.items(), key=lambda f: f[0][0]):
        published = next(iter(cells.values())).published
        lines.append(SideBySide(QUANTITIES[quantity], distribution, policy, published, cells))
    return tuple(lines)


def compare(
    results: Iterable[Row], fragmentation: Iterable[Row], paper: PublishedFigures | None = None
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


def _cells(quantity: Quantity, rows: Sequence[Row], paper: PublishedFigures) -> list[Cell]:
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
