"""Bars of the queueing experiment: waits by tenant, and give-ups by profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from slicewise.lab.figures.rows import Row, distinct, interval, require_rows, value
from slicewise.lab.figures.style import INK, house_style, light_grid, plain

_PANELS = (
    ("tenant", "mean_wait_lifetimes", "Wait by tenant", "mean, of the mean lifetime"),
    ("profile", "gave_up_share", "Gave up by profile", "of the requests"),
)
_GROUP = 0.84
"""The share of a group's width that its bars take."""

_COLOURS = ("#999999", "#e69f00", "#cc79a7", "#56b4e9", "#0072b2", "#009e73", "#332288")
"""One for each discipline, in order."""


def queueing_bars(rows: Iterable[Row]) -> Figure:
    """Draw a row of panels for each scenario, policy and load, with a bar for each discipline."""
    every = require_rows(rows, "bars")
    cells = list(dict.fromkeys((row["scenario"], row["policy"], row["load"]) for row in every))
    with house_style():
        figure = Figure(figsize=(11, 0.6 + 3.4 * len(cells)), layout="constrained")
        panels = figure.subplots(len(cells), len(_PANELS), squeeze=False)
        for line, cell in zip(panels, cells, strict=True):
            here = [row for row in every if (row["scenario"], row["policy"], row["load"]) == cell]
            for axes, (group, name, title, label) in zip(line, _PANELS, strict=True):
                _draw(axes, [row for row in here if row["group"] == group], name)
                axes.set_title(f"{title}: {cell[0]}, {plain(cell[1])}, load {cell[2]:g}")
                axes.set_ylabel(label)
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def _draw(axes: Axes, rows: Sequence[Row], figure: str) -> None:
    """Draw the bars of one figure with their intervals."""
    names, disciplines = distinct(rows, "name"), distinct(rows, "discipline")
    room = _GROUP / len(disciplines)
    for index, discipline in enumerate(disciplines):
        by_name = {row["name"]: row for row in rows if row["discipline"] == discipline}
        found = [by_name[name] for name in names]
        heights = np.array([value(row, figure) for row in found])
        places = np.arange(len(names), dtype=float) - _GROUP / 2 + room * (index + 0.5)
        colour = _COLOURS[index % len(_COLOURS)]
        axes.bar(places, heights, width=0.86 * room, color=colour, label=discipline)
        low, high = np.array([interval(row, figure) for row in found]).T
        whiskers = np.clip([heights - low, high - heights], 0, None)
        axes.errorbar(places, heights, yerr=whiskers, fmt="none", ecolor=INK, elinewidth=1)
    axes.set_xticks(range(len(names)), [plain(str(name)) for name in names])
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    light_grid(axes)
