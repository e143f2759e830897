"""Picking values out of rows of results: what every drawing of results begins with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slicewise.core.errors import SlicewiseError, UnknownNameError

Row = Mapping[str, Any]
"""A line of results: plain values, with an interval beside a figure as ``..._ci95``."""

PublishedValues = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Published values by figure, distribution and policy."""


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """The values of a column, each once, in the order in which they first appear."""
    return list(dict.fromkeys(row[key] for row in rows))


def require_rows(rows: Iterable[Row], what: str) -> list[Row]:
    """The rows as a list; a drawing of nothing is refused."""
    found = list(rows)
    if not found:
        raise SlicewiseError(f"there are no results to draw {what} from")
    return found


def rows_of(rows: Sequence[Row], distribution: str) -> list[Row]:
    """The rows of one distribution; an unknown one is refused with the close ones."""
    found = [row for row in rows if row["distribution"] == distribution]
    if not found:
        raise UnknownNameError("distribution", distribution, distinct(rows, "distribution"))
    return found


def value(row: Row | None, figure: str) -> float:
    """A figure of a row, NaN where it is not known."""
    number = None if row is None else row.get(figure)
    return math.nan if number is None else float(number)


def interval(row: Row | None, figure: str) -> tuple[float, float]:
    """The 95% interval of a figure; both ends NaN where it is not known."""
    ends = None if row is None else row.get(f"{figure}_ci95")
    return (math.nan, math.nan) if ends is None else (float(ends[0]), float(ends[1]))
