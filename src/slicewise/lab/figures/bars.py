"""Bar charts of policies, grouped by distribution, with 95% intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.rows import (
    LABELS,
    PANELS,
    PublishedValues,
    Row,
    distinct,
    interval,
    require_rows,
    value,
)
from slicewise.lab.figures.style import (
    INK,
    PAPER,
    SOFT,
    house_style,
    legend_columns,
    light_grid,
    note_nothing_measured,
    plain,
    policy_style,
    tick,
)

Floats = npt.NDArray[np.float64]

_GROUP = 0.84
"""The share of a group's width that its bars take."""
_WIDE_SPAN = 20.0
"""Ratio of largest to smallest value from which a linear scale hides the small ones."""
_MANY_DECADES = 500.0
"""Ratio up to which a logarithmic scale has room for lines at 2 and 5."""
_SAME_DEMAND = 1e-6


def bars_at_demand(
    rows: Iterable[Row], demand: float = 0.85, published: PublishedValues | None = None
) -> Figure:
    """Draw four figures at one demand; diamonds on the bars are the published values."""
    every = require_rows(rows, "bars")
    chosen = [row for row in every if abs(row["demand"] - demand) < _SAME_DEMAND]
    if not chosen:
        known = ", ".join(f"{label:g}" for label in distinct(every, "demand"))
        raise SlicewiseError(f"no results at demand {demand:g}; known: {known}")
    with house_style():
        figure = Figure(figsize=(11, 7.4), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        panels = figure.subplots(2, 2)
        for axes, name in zip(panels.flat, PANELS, strict=True):
            label = LABELS[name]
            _draw(axes, chosen, name, (published or {}).get(name, {}))
            axes.set_title(label.title)
            axes.set_ylabel(label.axis)
            if label.top is not None:
                axes.set_ylim(0, label.top * 1.06)
        _legend(figure, chosen, published is not None)
    return figure


def fragmentation_bars(
    fragmentation_rows: Iterable[Row], published: PublishedValues | None = None
) -> Figure:
    """Draw the average fragmentation, on a logarithmic scale if small values would vanish."""
    name = "fragmentation"
    chosen = require_rows(fragmentation_rows, "bars")
    theirs = (published or {}).get(name, {})
    with house_style():
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        axes = figure.subplots()
        _draw(axes, chosen, name, theirs)
        _scale(axes, chosen, name, theirs)
        axes.set_ylabel(LABELS[name].axis)
        _legend(figure, chosen, published is not None)
    return figure


def steady_bars(rows: Iterable[Row]) -> Figure:
    """Draw the share of requests rejected under sustained load, with a panel per load.

    The oracle is dotted grey; it has no bar if it could not run.
    """
    name = "rejected_share"
    given = require_rows(rows, "bars")
    every = [row for row in given if row["policy"] != "oracle" or row[name] is not None]
    loads = distinct(every, "load")
    with house_style():
        figure = Figure(figsize=(10, 0.6 + 4 * len(loads)), layout="constrained")
        panels = figure.subplots(len(loads), 1, squeeze=False)
        for axes, load in zip(panels.flat, loads, strict=True):
            chosen = [row for row in every if row["load"] == load]
            _draw(axes, chosen, name, {})
            _scale(axes, chosen, name, {})
            axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
            axes.set_title(f"Offered load: {100 * load:g}% of capacity")
            axes.set_ylabel("requests rejected")
        _legend(figure, every, False)
    return figure


def _by_cell(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    return {(row["distribution"], row["policy"]): row for row in rows}


def _draw(
    axes: Axes, rows: Sequence[Row], figure: str, published: Mapping[str, Mapping[str, float]]
) -> None:
    """Draw the bars of one figure with their intervals, and the published values as diamonds."""
    distributions = distinct(rows, "distribution")
    for index, policy in enumerate(distinct(rows, "policy")):
        places, heights = _draw_policy(axes, rows, figure, index)
        theirs = [published.get(d, {}).get(policy, math.nan) for d in distributions]
        if not np.isnan(theirs).all():
            axes.plot(
                places,
                theirs,
                linestyle="none",
                marker="D",
                markersize=5,
                markerfacecolor=PAPER,
                markeredgecolor=INK,
                markeredgewidth=1.1,
                clip_on=False,
                zorder=4,
            )
        for place in places[heights == 0]:  # a bar without height is invisible
            axes.annotate(
                "0",
                (place, 0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                color=SOFT,
            )
    if all(math.isnan(value(row, figure)) for row in rows):
        note_nothing_measured(axes)
    _name_distributions(axes, distributions)
    light_grid(axes)


def _draw_policy(axes: Axes, rows: Sequence[Row], figure: str, index: int) -> tuple[Floats, Floats]:
    """Draw the bars and intervals of one policy; return their places and heights."""
    distributions, policies = distinct(rows, "distribution"), distinct(rows, "policy")
    by_cell = _by_cell(rows)
    look = policy_style(policies[index])
    found = [by_cell.get((distribution, policies[index])) for distribution in distributions]
    heights = np.array([value(row, figure) for row in found])
    room = _GROUP / len(policies)
    places = np.arange(len(distributions), dtype=float) - _GROUP / 2 + room * (index + 0.5)
    axes.bar(
        places,
        heights,
        width=0.86 * room,
        color=look.colour,
        hatch=look.hatch,
        edgecolor=PAPER if look.hatch else look.colour,
        linewidth=0,
        label=plain(policies[index]),
    )
    low, high = np.array([interval(row, figure) for row in found]).T
    whiskers = np.clip([heights - low, high - heights], 0, None)
    axes.errorbar(places, heights, yerr=whiskers, fmt="none", ecolor=INK, elinewidth=1)
    return places, heights


def _name_distributions(axes: Axes, distributions: Sequence[str]) -> None:
    axes.set_xticks(range(len(distributions)), [tick(name) for name in distributions])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(distributions) - 0.5)


def _scale(
    axes: Axes, rows: Sequence[Row], figure: str, published: Mapping[str, Mapping[str, float]]
) -> None:
    """Set a logarithmic scale if the values span too much for a linear one."""
    shown = [value(row, figure) for row in rows]
    shown += [number for by_policy in published.values() for number in by_policy.values()]
    positive = [number for number in shown if number > 0]
    if not positive:
        axes.set_ylim(0, 1)
    elif max(positive) < _WIDE_SPAN * min(positive):
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    else:
        axes.set_yscale("log")
        few = max(positive) < _MANY_DECADES * min(positive)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        low = 10 ** math.floor(math.log10(0.9 * min(positive)))
        axes.set_ylim(low, 1.5 * max(positive))


def _legend(figure: Figure, rows: Sequence[Row], published: bool) -> None:
    handles: list[Patch | Line2D] = []
    for policy in distinct(rows, "policy"):
        look = policy_style(policy)
        patch = Patch(
            facecolor=look.colour,
            hatch=look.hatch,
            edgecolor=PAPER,
            linewidth=0,
            label=plain(policy),
        )
        handles.append(patch)
    if published:
        diamond = Line2D([], [], linestyle="none", marker="D", markersize=5, label="published")
        diamond.set(markerfacecolor=PAPER, markeredgecolor=INK, markeredgewidth=1.1)
        handles.append(diamond)
    columns = legend_columns([str(h.get_label()) for h in handles], figure.get_figwidth())
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)
