"""The HTML report of a sweep: drawings, sortable tables, and what was run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from slicewise.lab.experiment import ORACLE
from slicewise.lab.figures.rows import Row, distinct, interval, value
from slicewise.lab.figures.save import svg_text
from slicewise.lab.figures.sweep import MAX_PANELS, split, swatch, sweep_groups
from slicewise.lab.html import render_page

MAX_ROWS = 5000
"""Maximum number of rows in the table of all figures: browsers are slow with more."""

_OPEN_GROUPS = 4
"""Groups of drawings that are unfolded at first."""

_SHOWN_DEMAND = 0.85
"""The demand bin of the published experiment that the page shows."""

_INDIGO = "#332288"
"""A policy colour that is invisible on a dark page, where the page sets a lighter one."""


@dataclass(frozen=True)
class SweepMeta:
    """What was run, in enough detail to run it again."""

    title: str
    file: str
    """The name of the experiment file."""
    text: str
    """The content of the experiment file."""
    summary: str
    """What the sweep covers, in one line."""
    facts: Mapping[str, str]
    incomplete: str = ""
    """A sentence that says what is missing; empty if everything was run."""


def render_sweep(meta: SweepMeta, rows: Sequence[Row]) -> str:
    """Return the page. It loads nothing, and its only script sorts and filters the tables."""
    steady = "load" in rows[0]
    shown = shown_rows(rows)
    groups, skipped = sweep_groups(rows)
    drawings = _Drawings()
    return render_page(
        "sweep_report.html",
        style="sweep_report.css",
        script="sweep_report.js",
        title=meta.title,
        meta=meta,
        steady=steady,
        wins=count_wins(shown) if steady else [],
        legend={
            name: drawings.svg(swatch(name), f"the line of {name}")
            for name in distinct(rows, "policy")
        }
        if any(group.needs_legend for group in groups)
        else {},
        groups=[
            (group, [(p.title, drawings.svg(p.figure, p.description)) for p in group.panels])
            for group in groups
        ],
        open_groups=_OPEN_GROUPS,
        skipped=f"{skipped} groups of drawings are left out: a page shows {MAX_PANELS} at most."
        if skipped
        else "",
        rejected=rejected_tables(shown) if steady else [],
        reading=_reading(shown, steady),
        all_figures=all_figures_table(shown),
        cut=f"The first {MAX_ROWS:,} of {len(shown):,} rows." if len(shown) > MAX_ROWS else "",
    )


class _Drawings:
    """Numbers the drawings of a page, which keeps their ids apart."""

    def __init__(self) -> None:
        self._count = 0

    def svg(self, figure: Figure, description: str) -> str:
        name = f"drawing-{self._count}"
        self._count += 1
        svg = svg_text(figure, name, description)
        return svg.replace(_INDIGO, f"var(--figure-indigo, {_INDIGO})")


@dataclass(frozen=True)
class Column:
    """A figure as a table column: heading, factor and number of decimals."""

    heading: str
    figure: str
    factor: float = 1
    digits: int = 2


_REJECTED = Column("rejected %", "rejected_share", 100)
_STEADY = (
    _REJECTED,
    Column("of slices %", "rejected_slices_share", 100),
    Column("utilization %", "utilization_percent", 1, 1),
    Column("active GPUs %", "active_gpus_percent", 1, 1),
    Column("F", "fragmentation"),
    Column("rejected % more than {first}", "rejected_share_difference", 100),
)
_PUBLISHED = (
    Column("accepted %", "acceptance_rate", 100, 1),
    Column("scheduled / mfi", "scheduled_ratio_to_mfi", 1, 3),
    Column("utilization %", "utilization_percent", 1, 1),
    Column("active GPUs %", "active_gpus_percent", 1, 1),
    Column("F", "fragmentation"),
)

_SETTINGS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "distribution": ("distribution", str),
    "model": ("model", str),
    "gpus": ("GPUs", str),
    "load": ("load %", lambda load: f"{100 * load:g}"),
    "seed": ("seed", str),
}
"""By column of the results: its heading and format. Shown if the sweep has several values."""


@dataclass(frozen=True)
class TableCell:
    """A cell of a sortable table."""

    text: str
    sort_by: object = None
    """A number to sort by, empty if the figure is unknown; None sorts by the text."""
    note: str = ""
    best: bool = False


@dataclass(frozen=True)
class SortableTable:
    """A table with a row per policy, sorted by a click on a heading."""

    label: str
    headings: Sequence[tuple[str, bool]]
    """Each with whether its column is text; the others are numbers."""
    rows: Sequence[tuple[str, Sequence[TableCell]]]
    """By policy."""
    caption: str = ""
    note: str = ""


def shown_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows the page shows: all, or those of the published experiment at 85% demand."""
    return [row for row in rows if row.get("demand", _SHOWN_DEMAND) == _SHOWN_DEMAND]


def count_wins(rows: Sequence[Row]) -> list[tuple[str, int, int, bool]]:
    """Count the settings in which each policy rejects the fewest requests, most wins first.

    Each item has the policy, its wins, the number of settings, and whether it has the most wins.
    Ties count for "several alike". With one policy there is nothing to count.
    """
    policies = [name for name in distinct(rows, "policy") if name != ORACLE]
    if len(policies) < 2:
        return []
    wins: Counter[str] = Counter()
    settings = 0
    for *_, chosen in split(rows, "model", "gpus", "load", "seed", "distribution"):
        shares = {row["policy"]: value(row, "rejected_share") for row in chosen}
        lowest = min(shares[name] for name in policies)
        fewest = [name for name in policies if shares[name] == lowest]
        wins[fewest[0] if len(fewest) == 1 else ""] += 1
        settings += 1
    ranked = sorted(policies, key=lambda name: -wins[name])
    most = wins[ranked[0]]
    counted = [(name, wins[name], settings, wins[name] == most) for name in ranked]
    if wins[""]:
        counted.append(("several alike", wins[""], settings, False))
    return counted


def rejected_tables(rows: Sequence[Row]) -> list[tuple[str, list[SortableTable]]]:
    """Return tables of rejections by policy and load, or by size if there is only one load.

    They come in titled groups, one per model and size (or load) and seed.
    """
    across, fixed = ("load", "gpus") if len(distinct(rows, "load")) > 1 else ("gpus", "load")
    if len(distinct(rows, across)) < 2:
        return []
    several_seeds = len(distinct(rows, "seed")) > 1
    groups: list[tuple[str, list[SortableTable]]] = []
    for model, at, seed, chosen in split(rows, "model", fixed, "seed"):
        title = f"{at} {model}" if fixed == "gpus" else f"{model} at load {100 * at:g}%"
        title += f", seed {seed}" if several_seeds else ""
        tables = [
            _rejected_table(f"{title}, {distribution}", distribution, of_mix, across)
            for distribution, of_mix in split(chosen, "distribution")
        ]
        groups.append((title, tables))
    return groups


def _rejected_table(
    label: str, distribution: str, rows: Sequence[Row], across: str
) -> SortableTable:
    heading, shown = _SETTINGS[across]
    places = distinct(rows, across)
    by_cell = {(row["policy"], row[across]): row for row in rows}
    fewest = {
        place: min(
            value(row, _REJECTED.figure)
            for row in rows
            if row[across] == place and row["policy"] != ORACLE
        )
        for place in places
    }

    def cell(policy: str, place: Any) -> TableCell:
        row = by_cell.get((policy, place))
        best = policy != ORACLE and value(row, _REJECTED.figure) == fewest[place]
        return _figure_cell(row, _REJECTED, best)

    return SortableTable(
        label,
        [("policy", True), *((shown(place), False) for place in places)],
        [(name, [cell(name, place) for place in places]) for name in distinct(rows, "policy")],
        distribution,
        f"rejected %, by {heading}",
    )


def all_figures_table(rows: Sequence[Row]) -> SortableTable:
    """Return a table with every figure of the first `MAX_ROWS` rows."""
    columns = _STEADY if "load" in rows[0] else _PUBLISHED
    several = [key for key in _SETTINGS if key in rows[0] and len(distinct(rows, key)) > 1]
    lines = [
        (
            row["policy"],
            [
                *(_setting_cell(key, row[key]) for key in several),
                *(_figure_cell(row, column) for column in columns),
                TableCell(str(row["runs"]), row["runs"]),
            ],
        )
        for row in rows[:MAX_ROWS]
    ]
    first = str(rows[0].get("compared_with", ""))
    headings = [
        ("policy", True),
        *((_SETTINGS[key][0], isinstance(rows[0][key], str)) for key in several),
        *((column.heading.format(first=first), False) for column in columns),
        ("runs", False),
    ]
    return SortableTable("All figures", headings, lines)


def _setting_cell(key: str, given: Any) -> TableCell:
    text = _SETTINGS[key][1](given)
    return TableCell(text) if isinstance(given, str) else TableCell(text, given)


def _figure_cell(row: Row | None, column: Column, best: bool = False) -> TableCell:
    number = value(row, column.figure) * column.factor
    if math.isnan(number):
        return TableCell("\N{EN DASH}", "")
    low, high = interval(row, column.figure)
    half = (high - low) / 2 * column.factor
    return TableCell(
        f"{number:.{column.digits}f}".replace("-", "\N{MINUS SIGN}"),
        repr(number),
        "" if math.isnan(half) else f"\N{PLUS-MINUS SIGN}{half:.{column.digits}f}",
        best,
    )


def _reading(rows: Sequence[Row], steady: bool) -> list[str]:
    """Return sentences that explain the figures."""
    sentences = [
        "All policies see the same arrivals, run by run; intervals are over the runs.",
        "Utilization: occupied slices. Active: GPUs with at least one instance. "
        "F: the mean fragmentation score over all GPUs.",
    ]
    if steady:
        first = str(rows[0]["compared_with"])
        sentences[1:1] = [
            "Arrivals continue for many lifetimes at a constant offered load: the demand if "
            "nothing were rejected, as a share of all slices.",
            "Rejected: requests that were not placed; of slices: the same, weighted by size.",
            "On a scale that reads 0.1%, 1%, 10%, every step is ten times the one below; the "
            "lowest step goes down to zero.",
            f"More than {first}: the difference in rejected requests, paired run by run.",
        ]
        limit = [row for row in rows if row["policy"] == ORACLE]
        if limit:
            sentences.append(
                f"{ORACLE} is not a policy but the limit: it may move every instance at no cost, "
                "so its instances are on no particular GPU."
            )
        missing = dict.fromkeys(row["oracle_missing"] for row in limit)
        sentences += [f"No {ORACLE}: {why}." for why in missing if why is not None]
    else:
        sentences[1:1] = [
            "An empty cluster is filled until everything requested adds up to its capacity; "
            "demand is what was requested so far, as a share of it.",
            "Accepted: placed requests over arrivals, within 5 points of demand.",
        ]
    if len(distinct(rows, "seed")) > 1:
        sentences.append("Each seed has its own line, in the same style, and its own rows.")
    return sentences
