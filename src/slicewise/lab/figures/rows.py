"""Rows of results as drawings read them: values, intervals and labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.lab.tables import Row as Row

PublishedValues = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Published values by figure, distribution and policy."""


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """Return the distinct values of a column, in order of first appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def require_rows(rows: Iterable[Row], what: str) -> list[Row]:
    """Return the rows as a list; raise if there are none to draw."""
    found = list(rows)
    if not found:
        raise SlicewiseError(f"there are no results to draw {what} from")
    return found


def rows_of(rows: Sequence[Row], distribution: str) -> list[Row]:
    """Return the rows of one distribution; the error for an unknown one names close names."""
    found = [row for row in rows if row["distribution"] == distribution]
    if not found:
        raise UnknownNameError("distribution", distribution, distinct(rows, "distribution"))
    return found


def value(row: Row | None, figure: str) -> float:
    """Return a figure of a row, NaN if unknown."""
    number = None if row is None else row.get(figure)
    return math.nan if number is None else float(number)


def interval(row: Row | None, figure: str) -> tuple[float, float]:
    """Return the 95% interval of a figure, NaN if unknown."""
    ends = None if row is None else row.get(f"{figure}_ci95")
    return (math.nan, math.nan) if ends is None else (float(ends[0]), float(ends[1]))


@dataclass(frozen=True)
class FigureLabel:
    """How drawings label a column of the results."""

    title: str
    axis: str
    top: float | None = None
    """The largest possible value, if any."""


LABELS = {
    "scheduled_ratio_to_mfi": FigureLabel("Scheduled workloads", "relative to MFI", 1.0),
    "acceptance_rate": FigureLabel("Acceptance rate", "accepted share of arrivals", 1.0),
    "utilization_percent": FigureLabel("Utilization", "slices in use (%)", 100.0),
    "active_gpus_percent": FigureLabel("Active GPUs", "GPUs in use (%)", 100.0),
    "fragmentation": FigureLabel("Fragmentation", "mean score F over GPUs"),
}
"""By column, in the order of the drawings."""

PANELS = tuple(name for name in LABELS if name != "fragmentation")
"""The four that the paper shows together."""
