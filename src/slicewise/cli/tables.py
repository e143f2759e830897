"""Rich tables, printed with all their digits."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_WIDEST = 1000
"""More than any table asks for, in columns of a terminal."""


def print_table(table: Table, console: Console) -> None:
    """Print a table with all its digits: one wider than the terminal runs over its edge."""
    every_column = console.options.update(max_width=_WIDEST)
    width = console.width
    console.width = max(width, console.measure(table, options=every_column).maximum)
    console.print(table)
    console.width = width
