"""Tables of results in the terminal, by Rich."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

if TYPE_CHECKING:  # `score` and others draw tables without the laboratory
    from slicewise.lab.tables import Table

_WIDEST = 1000
"""Wider than any table, in columns."""


def figures_table(
    headings: Iterable[str],
    caption: str | None = None,
    first: str = "",
    max_width: int | None = None,
) -> RichTable:
    """Return an empty table: a column of names, then right-aligned columns of figures.

    ``max_width`` keeps long names from pushing the figures off the screen.
    """
    table = RichTable(box=None, padding=(0, 1, 0, 0), caption=caption)
    table.add_column(first, no_wrap=True, max_width=max_width)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def rich_table(table: Table, caption: str | None = None, max_width: int | None = None) -> RichTable:
    """Return a table of results for Rich; its notes are left to the caller."""
    made = figures_table(table.headings, caption, max_width=max_width)
    for heading, lines in table.groups:
        if heading is not None:
            # A custom distribution can be long: one line per profile keeps the figures in view.
            made.add_row(Text(heading.replace(",", ",\n"), "bold"))
        for name, cells in lines:
            made.add_row(Text(name if heading is None else f"  {name}"), *cells)
    return made


def print_table(table: RichTable, console: Console) -> None:
    """Print a table without cutting columns, even if it is wider than the terminal."""
    every_column = console.options.update(max_width=_WIDEST)
    width = console.width
    console.width = max(width, console.measure(table, options=every_column).maximum)
    console.print(table)
    console.width = width
