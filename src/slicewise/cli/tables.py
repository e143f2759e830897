"""Tables of results in the terminal, by Rich."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from slicewise.cli.output import Row

Columns = Mapping[str, tuple[str, float, int]]
"""By heading: the figure, its scale, and the number of digits."""

_WIDEST = 1000
"""Wider than any table, in columns."""


def figures_table(
    headings: Iterable[str],
    caption: str | None = None,
    first: str = "",
    max_width: int | None = None,
) -> Table:
    """Return an empty table: a column of names, then right-aligned columns of figures.

    ``max_width`` keeps long names from pushing the figures off the screen.
    """
    table = Table(box=None, padding=(0, 1, 0, 0), caption=caption)
    table.add_column(first, no_wrap=True, max_width=max_width)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def figure_cell(row: Row | None, figure: str, scale: float, digits: int) -> str:
    """Format a figure of a row and half of its 95% interval, if it has one."""
    value = None if row is None else row[figure]
    if row is None or not isinstance(value, (int, float)):
        return "-"
    text = f"{value * scale:.{digits}f}"
    interval = row.get(f"{figure}_ci95")
    if not isinstance(interval, list):
        return text
    return f"{text}±{(interval[1] - interval[0]) / 2 * scale:.{digits}f}"


def print_table(table: Table, console: Console) -> None:
    """Print a table without cutting columns, even if it is wider than the terminal."""
    every_column = console.options.update(max_width=_WIDEST)
    width = console.width
    console.width = max(width, console.measure(table, options=every_column).maximum)
    console.print(table)
    console.width = width
