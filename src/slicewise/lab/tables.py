"""Tables of results: which figures, how they are written, and the table as text and as HTML.

Commands print the same tables with Rich.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from slicewise.lab.experiment import ORACLE

Row = Mapping[str, Any]
"""A row of results, with the interval of a figure as ``..._ci95``."""

Columns = Mapping[str, tuple[str, float, int]]
"""By heading: the figure, its scale, and the number of digits."""

Line = tuple[str, tuple[str, ...]]
"""The name of a line, and its cells."""


@dataclass(frozen=True)
class Table:
    """Lines of cells under headings, in groups that may have a heading of their own."""

    headings: tuple[str, ...]
    groups: tuple[tuple[str | None, tuple[Line, ...]], ...]
    notes: tuple[str, ...] = ()
    """What the table does not say by itself, a sentence each."""

    def __str__(self) -> str:
        return "\n".join([*self._lines(), *self.notes])

    def _lines(self) -> Iterator[str]:
        lines = [line for _, group in self.groups for line in group]
        indent = "" if all(name is None for name, _ in self.groups) else "  "
        names = [len(name or "") for name, _ in self.groups]
        first = max([*names, *(len(indent + name) for name, _ in lines)], default=0)
        widths = [
            max(len(cell) for cell in column)
            for column in zip(self.headings, *(cells for _, cells in lines), strict=True)
        ]

        def written(name: str, cells: Sequence[str]) -> str:
            padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            return "  ".join((name.ljust(first), *padded)).rstrip()

        yield written("", self.headings)
        for heading, group in self.groups:
            if heading is not None:
                yield heading
            for name, cells in group:
                yield written(indent + name, cells)

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:right'>{escape(h)}</th>" for h in self.headings)
        body = "".join(self._html_rows())
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def _html_rows(self) -> Iterator[str]:
        for heading, group in self.groups:
            if heading is not None:
                across = f"<th colspan='{1 + len(self.headings)}' style='text-align:left'>"
                yield f"<tr>{across}{escape(heading)}</th></tr>"
            for name, cells in group:
                each = "".join(f"<td style='text-align:right'>{escape(c)}</td>" for c in cells)
                yield f"<tr><td style='text-align:left'>{escape(name)}</td>{each}</tr>"


def figure_cell(row: Row | None, figure: str, scale: float, digits: int) -> str:
    """Format a figure of a row and its 95% interval, if it has one.

    The interval of a part of a whole may end at 0 or at the whole; then both ends are written.
    """
    value = None if row is None else row[figure]
    if row is None or not isinstance(value, (int, float)):
        return "-"
    text = f"{value * scale:.{digits}f}"
    interval = row.get(f"{figure}_ci95")
    if not isinstance(interval, list):
        return text
    low, high = interval
    below, above = ((end - value) * scale for end in interval)
    if abs(below + above) < 10**-digits:
        return f"{text}±{(high - low) / 2 * scale:.{digits}f}"
    return f"{text} ({low * scale:.{digits}f} to {high * scale:.{digits}f})"


def figures(row: Row, columns: Columns) -> tuple[str, ...]:
    """Format the figures of a row."""
    return tuple(figure_cell(row, *column) for column in columns.values())


def grouped(
    rows: Sequence[Row], cells: Callable[[Row], Iterable[str]], by: str = "distribution"
) -> tuple[tuple[str | None, tuple[Line, ...]], ...]:
    """Return a group of lines for each value of a column, with a line for each policy."""
    return tuple(
        (
            None if value is None else str(value),
            tuple((str(r["policy"]), tuple(cells(r))) for r in rows if r.get(by) == value),
        )
        for value in dict.fromkeys(row.get(by) for row in rows)
    )


def runs_of(rows: Sequence[Row]) -> str:
    """Return the number of runs; after an interruption it may differ by distribution."""
    runs = sorted({int(str(row["runs"])) for row in rows})
    return str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"


PUBLISHED: Columns = {
    "acceptance": ("acceptance_rate", 1, 3),
    "sched/mfi": ("scheduled_ratio_to_mfi", 1, 3),
    "util. %": ("utilization_percent", 1, 1),
    "active %": ("active_gpus_percent", 1, 1),
    "F": ("fragmentation", 1, 2),
}
SHOWN_DEMAND = 0.85
"""The published experiment has rows for every demand; a table shows this one."""

REPLAYED: Columns = {
    "rejected %": ("rejected_share", 100, 2),
    "of slices": ("rejected_slices_share", 100, 2),
    "util. %": ("utilization_percent", 1, 1),
    "peak": ("peak_utilization_percent", 1, 1),
    "active %": ("active_gpus_percent", 1, 1),
    "F": ("fragmentation", 1, 2),
}


def steady_columns(rows: Sequence[Row]) -> Columns:
    """Return the columns of the steady experiment, with moves if there are any."""
    first = str(rows[0]["compared_with"])
    columns = {
        "rejected %": ("rejected_share", 100.0, 2),
        "of slices": ("rejected_slices_share", 100.0, 2),
        "util. %": ("utilization_percent", 1.0, 1),
        "active %": ("active_gpus_percent", 1.0, 1),
        "F": ("fragmentation", 1.0, 2),
        f"vs {first}" if len(first) < 12 else "vs first": ("rejected_share_difference", 100.0, 2),
    }
    if "migrated_share" in rows[0]:
        del columns["active %"]  # keeps the table narrow
        columns["moves %"] = ("migrated_share", 100.0, 2)
    return columns


def steady_table(rows: Sequence[Row]) -> Table:
    """Return the table of the steady experiment."""
    columns = steady_columns(rows)
    missing = dict.fromkeys(r["oracle_missing"] for r in rows if r["policy"] == ORACLE)
    notes = tuple(f"{ORACLE}: {why}" for why in missing if why is not None)
    return Table(tuple(columns), grouped(rows, lambda row: figures(row, columns)), notes)


def published_table(rows: Sequence[Row]) -> Table:
    """Return the table of the published experiment, at one demand."""
    shown = [row for row in rows if row["demand"] == SHOWN_DEMAND]
    return Table(tuple(PUBLISHED), grouped(shown, lambda row: figures(row, PUBLISHED)))


def replay_table(rows: Sequence[Row]) -> Table:
    """Return the table of a replay, with the rejections although enough slices were free."""

    def cells(row: Row) -> tuple[str, ...]:
        return (*figures(row, REPLAYED), fragmented(row))

    return Table((*REPLAYED, "fragmented"), grouped(rows, cells))


def fragmented(row: Row) -> str:
    """Format the share of rejections by fragmentation; the oracle has none."""
    reasons = row["rejected_by_reason"]
    assert isinstance(reasons, dict)
    is_oracle = row["peak_active_gpus_percent"] is None
    return "-" if is_oracle else f"{reasons['fragmented']}/{row['rejected']}"


_DRAWN = ("GPUs", "95%", "load", "rejected %", "saved", "95%", "saved %", "above")
_RECORDED = ("GPUs", "chance", "load", "rejected", "rejected %", "saved", "saved %")


def plan_table(rows: Sequence[Row], share: str, recorded: bool) -> Table:
    """Return the table of a plan; ``share`` is the figure that the target is about."""
    cells = _trace_cells if recorded else _demand_cells
    return Table(_RECORDED if recorded else _DRAWN, grouped(rows, lambda row: cells(row, share)))


def _demand_cells(row: Row, share: str) -> Iterator[str]:
    yield _whole(row["needed_gpus"])
    yield _span(row["needed_gpus_ci95"], "-")
    yield _decimals(row["load"], 2)
    yield percent_of(row[share])
    yield _whole(row["saved_gpus"])
    yield _span(row["saved_gpus_ci95"], " to ")
    yield _decimals(row["saved_percent"], 1)
    yield _whole(row["above_limit_gpus"])


def _trace_cells(row: Row, share: str) -> Iterator[str]:
    first, needed = row["first_gpus"], row["needed_gpus"]
    yield _whole(needed)
    yield "-" if first == needed else _span([first, needed], "-")
    yield _decimals(row["load"], 2)
    yield _whole(row["rejected"])
    yield percent_of(row[share])
    yield _whole(row["saved_gpus"])
    yield _decimals(row["saved_percent"], 1)


def number(value: object) -> float:
    """Return a figure that is known."""
    assert isinstance(value, (int, float))
    return value


def _whole(value: object) -> str:
    return "-" if value is None else f"{value}"


def _decimals(value: object, digits: int) -> str:
    return "-" if value is None else f"{number(value):.{digits}f}"


def percent_of(share: object) -> str:
    """Format a share in percent."""
    return "-" if share is None else f"{100 * number(share):.3g}"


def _span(ends: object, between: str) -> str:
    if not isinstance(ends, list):
        return "-"
    low, high = ends
    return _whole(low) if low == high else f"{_whole(low)}{between}{_whole(high)}"
