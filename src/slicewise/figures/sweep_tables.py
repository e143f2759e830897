"""The tables of a sweep's report: who rejects the fewest, by load or size, and every figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from slicewise.figures.rows import Row, distinct, interval, value
from slicewise.figures.sweep import split

LIMIT = "oracle"
"""The entrant that is not a policy but the limit of all."""

MOST_ROWS = 5000
"""Rows of the long table: a browser is slow with more, and Parquet has them all."""

_SHOWN_DEMAND = 0.85
"""The published experiment has a row for each bin of demand; the page shows this one."""


@dataclass(frozen=True)
class Column:
    """A figure as a column: its heading, what it is multiplied with, how many digits it has."""

    heading: str
    figure: str
    factor: float = 1
    digits: int = 2


_STEADY = (
    Column("rejected %", "rejected_share", 100),
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

_SETTING: dict[str, tuple[str, Callable[[Any], str]]] = {
    "distribution": ("distribution", str),
    "model": ("model", str),
    "gpus": ("GPUs", str),
    "load": ("load %", lambda load: f"{100 * load:g}"),
    "seed": ("seed", str),
}
"""What a row is about, by heading; shown where the sweep has several values of it."""


def shown_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows a page shows: all, or of the published experiment those at 85% demand."""
    return [row for row in rows if row.get("demand", _SHOWN_DEMAND) == _SHOWN_DEMAND]


def winner_tiles(rows: Sequence[Row]) -> str:
    """How often each policy rejects fewer requests than all others; ties are nobody's."""
    policies = [name for name in distinct(rows, "policy") if name != LIMIT]
    if len(policies) < 2:
        return ""
    times: Counter[str] = Counter()
    settings = 0
    for *_, chosen in split(rows, "model", "gpus", "load", "seed", "distribution"):
        shares = {row["policy"]: value(row, "rejected_share") for row in chosen}
        lowest = min(shares[name] for name in policies)
        fewest = [name for name in policies if shares[name] == lowest]
        times[fewest[0] if len(fewest) == 1 else ""] += 1
        settings += 1
    ranked = sorted(policies, key=lambda name: -times[name])
    tiles = [
        f'<li class="{"first" if times[name] == times[ranked[0]] else "other"}">'
        f"<b>{times[name]} of {settings}</b> <span>{escape(name)}</span></li>"
        for name in ranked
    ]
    if times[""]:
        tiles.append(f"<li><b>{times['']} of {settings}</b> <span>several alike</span></li>")
    return (
        "<p>In how many settings a policy rejects fewer requests than all others, on average "
        f'over the runs:</p><ul class="tiles">{"".join(tiles)}</ul>'
    )


def rejected_tables(rows: Sequence[Row]) -> str:
    """Rejections by policy against load, or against size where there is one load only."""
    across, fixed = ("load", "gpus") if len(distinct(rows, "load")) > 1 else ("gpus", "load")
    if len(distinct(rows, across)) < 2:
        return ""
    several_seeds = len(distinct(rows, "seed")) > 1
    blocks: list[str] = []
    for model, at, seed, chosen in split(rows, "model", fixed, "seed"):
        title = f"{at} {model}" if fixed == "gpus" else f"{model} at load {100 * at:g}%"
        title += f", seed {seed}" if several_seeds else ""
        tables = "".join(
            _rejected_table(f"{title}, {distribution}", distribution, of_mix, across)
            for distribution, of_mix in split(chosen, "distribution")
        )
        blocks.append(
            f'<div class="card"><h3>{escape(title)}</h3><div class="tables">{tables}</div></div>'
        )
    return "".join(blocks)


def _rejected_table(label: str, distribution: str, rows: Sequence[Row], across: str) -> str:
    column = _STEADY[0]
    heading, words = _SETTING[across]
    places = distinct(rows, across)
    by_cell = {(row["policy"], row[across]): row for row in rows}
    fewest = {
        place: min(
            value(row, column.figure)
            for row in rows
            if row[across] == place and row["policy"] != LIMIT
        )
        for place in places
    }
    lines: list[str] = []
    for name in distinct(rows, "policy"):
        found = [(place, by_cell.get((name, place))) for place in places]
        cells = "".join(
            _cell(row, column, name != LIMIT and value(row, column.figure) == fewest[place])
            for place, row in found
        )
        lines.append(_line(name, cells))
    headings = [("policy", True), *((words(place), False) for place in places)]
    caption = f'{escape(distribution)} <span class="note">rejected %, by {heading}</span>'
    return _table(label, headings, lines, caption)


def long_table(rows: Sequence[Row]) -> str:
    """Every figure of every row, to be sorted and filtered."""
    columns = _STEADY if "load" in rows[0] else _PUBLISHED
    several = [key for key in _SETTING if key in rows[0] and len(distinct(rows, key)) > 1]
    lines: list[str] = []
    for row in rows[:MOST_ROWS]:
        setting = ""
        for key in several:
            words = escape(_SETTING[key][1](row[key]))
            number = "" if isinstance(row[key], str) else f' data-value="{row[key]}"'
            setting += f"<td{number}>{words}</td>" if number else f'<td class="words">{words}</td>'
        figures = "".join(_cell(row, column) for column in columns)
        runs = f'<td data-value="{row["runs"]}">{row["runs"]}</td>'
        lines.append(_line(row["policy"], setting + figures + runs))
    first = str(rows[0].get("compared_with", ""))
    headings = [
        ("policy", True),
        *((_SETTING[key][0], isinstance(rows[0][key], str)) for key in several),
        *((column.heading.format(first=first), False) for column in columns),
        ("runs", False),
    ]
    filter_box = (
        '<div class="filter" data-table="all-figures" hidden>'
        '<label for="filter">Show rows with</label>'
        '<input id="filter" type="search" placeholder="words, in any order">'
        "<output></output></div>"
    )
    rest = ""
    if len(rows) > MOST_ROWS:
        rest = f'<p class="note">The first {MOST_ROWS:,} of {len(rows):,} rows.</p>'
    table = _table("All figures", headings, lines, identity="all-figures")
    return f'<div class="card">{filter_box}{table}{rest}</div>'


def _table(
    label: str,
    headings: Sequence[tuple[str, bool]],
    lines: Sequence[str],
    caption: str = "",
    identity: str = "",
) -> str:
    """A sortable table that can be scrolled sideways; headings say whether they are of words."""
    head = "".join(
        f'<th scope="col" class="{"words" if words else "number"}">{escape(name)}</th>'
        for name, words in headings
    )
    name = f' id="{identity}"' if identity else ""
    caption = f"<caption>{caption}</caption>" if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">'
        f'<table class="sortable"{name}>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _line(policy: str, cells: str) -> str:
    limit = ' class="limit"' if policy == LIMIT else ""
    return f'<tr{limit}><th scope="row" class="words">{escape(policy)}</th>{cells}</tr>\n'


def _cell(row: Row | None, column: Column, best: bool = False) -> str:
    number = value(row, column.figure) * column.factor
    if math.isnan(number):
        return '<td data-value="">&ndash;</td>'
    low, high = interval(row, column.figure)
    half = (high - low) / 2 * column.factor
    around = (
        "" if math.isnan(half) else f' <span class="note">&plusmn;{half:.{column.digits}f}</span>'
    )
    mark = ' class="best"' if best else ""
    text = f"{number:.{column.digits}f}".replace("-", "&minus;")
    return f'<td{mark} data-value="{number!r}">{text}{around}</td>'
