"""How long requests waited: the mean as a bar, and where the longest waits lie above it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from slicewise.figures.rows import Row, distinct, interval, require_rows, value
from slicewise.figures.style import INK, PAPER, house_style, light_grid, plain, policy_style, tick

_GROUP = 0.84
"""The share of a distribution's room that its bars take."""

_TAILS = {95: "_", 99: "v"}
"""By percentile: the marker that shows it."""


def waiting_bars(rows: Iterable[Row]) -> Figure:
    """Waits of those who were placed, in percent of the mean lifetime, by distribution."""
    every = require_rows(rows, "bars")
    distributions, policies = distinct(every, "distribution"), distinct(every, "policy")
    by_cell = {(row["distribution"], row["policy"]): row for row in every}
    room = _GROUP / len(policies)
    centres = np.arange(len(distributions), dtype=float)
    with house_style():
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        axes = figure.subplots()
        for index, policy in enumerate(policies):
            look = policy_style(policy)
            found = [by_cell.get((distribution, policy)) for distribution in distributions]
            heights = np.array([value(row, "mean_wait_lifetimes") for row in found])
            places = centres - _GROUP / 2 + room * (index + 0.5)
            axes.bar(
                places,
                heights,
                width=0.86 * room,
                color=look.colour,
                hatch=look.hatch,
                edgecolor=PAPER if look.hatch else look.colour,
                linewidth=0,
                label=plain(policy),
            )
            low, high = np.array([interval(row, "mean_wait_lifetimes") for row in found]).T
            whiskers = np.clip([heights - low, high - heights], 0, None)
            axes.errorbar(places, heights, yerr=whiskers, fmt="none", ecolor=INK, elinewidth=1)
            for percent, marker in _TAILS.items():
                tails = [value(row, f"wait_p{percent}_lifetimes") for row in found]
                axes.plot(places, tails, marker, color=look.colour, markersize=9)
        axes.set_xticks(centres, [tick(name) for name in distributions])
        axes.tick_params(axis="x", length=0)
        axes.set_xlim(-0.5, len(distributions) - 0.5)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_ylabel("wait, of the mean lifetime")
        light_grid(axes)
        handles, labels = axes.get_legend_handles_labels()
        for percent, marker in _TAILS.items():
            handles.append(Line2D([], [], color=INK, linestyle="none", marker=marker))
            labels.append(f"{percent}% wait no longer")
        figure.legend(handles, labels, loc="outside upper left", ncols=6)
    return figure
