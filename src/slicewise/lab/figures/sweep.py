"""The drawings of a sweep: a figure over load, size or demand, with a line per policy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from slicewise.core.errors import UnknownNameError
from slicewise.lab.figures.bars import steady_bars
from slicewise.lab.figures.rows import Row, distinct, interval, require_rows, value
from slicewise.lab.figures.style import (
    house_style,
    light_grid,
    note_nothing_measured,
    plain,
    policy_style,
)

ALONG = {
    "load": "offered load (% of capacity)",
    "gpus": "GPUs",
    "demand": "demand (% of capacity requested)",
}
"""The columns that a sweep can be drawn over, with their axis labels."""

FIGURES = {
    "rejected_share": "requests rejected",
    "acceptance_rate": "requests accepted",
}

MAX_PANELS = 48
"""Maximum number of panels in a page."""

_WIDE_SPAN = 20.0
"""From this ratio of largest to smallest value on, a linear scale hides the small ones."""
_DECADES = 3
"""How far down a logarithmic scale goes; what is smaller is as good as zero."""
_MOST_TICKS = 8
_MOST_WHISKERS = 12
"""With more points, intervals are drawn as a band."""


@dataclass(frozen=True)
class Panel:
    """A drawing with its heading and its description for screen readers."""

    title: str
    description: str
    figure: Figure


@dataclass(frozen=True)
class Group:
    """Panels that are shown together, on the same scale."""

    title: str
    panels: tuple[Panel, ...]
    needs_legend: bool = True


def sweep_groups(rows: Sequence[Row]) -> tuple[list[Group], int]:
    """Return the drawings of a sweep, over every column with several values.

    There are about `MAX_PANELS` panels at most; also return the number of groups left out.
    """
    found: list[Group] = []
    panels = left_out = 0
    for title, along, chosen in _groups(require_rows(rows, "curves")):
        if panels >= MAX_PANELS:
            left_out += 1
            continue
        found.append(_curves(title, along, chosen) if along else _bars(title, chosen))
        panels += len(found[-1].panels)
    return found, left_out


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, str, Sequence[Row]]]:
    """Yield what to draw: a title, the column to draw over (empty for bars), and the rows."""
    if "demand" in rows[0]:
        for model, gpus, chosen in split(rows, "model", "gpus"):
            yield f"{gpus:,} {model}", "demand", chosen
        return
    several = {key: len(distinct(rows, key)) > 1 for key in ("load", "gpus")}
    if several["load"]:
        for model, gpus, chosen in split(rows, "model", "gpus"):
            yield f"{gpus:,} {model}, by load", "load", chosen
    if several["gpus"]:
        for model, load, chosen in split(rows, "model", "load"):
            yield f"{model} at load {100 * load:g}%, by size", "gpus", chosen
    if not any(several.values()):
        several_seeds = len(distinct(rows, "seed")) > 1
        for model, gpus, seed, chosen in split(rows, "model", "gpus", "seed"):
            of_seed = f", seed {seed}" if several_seeds else ""
            yield f"{gpus:,} {model}{of_seed}", "", chosen


def _curves(title: str, along: str, rows: Sequence[Row]) -> Group:
    figure = "acceptance_rate" if along == "demand" else "rejected_share"
    panels = tuple(
        Panel(
            distribution,
            f"{FIGURES[figure]} against {ALONG[along]}, {distribution}, {title}: a line for each "
            "policy; the numbers are in the tables",
            sweep_curves(chosen, along, figure, rows),
        )
        for distribution, chosen in split(rows, "distribution")
    )
    return Group(title, panels)


def _bars(title: str, rows: Sequence[Row]) -> Group:
    description = f"requests rejected, {title}: a bar for each policy and distribution"
    return Group(title, (Panel("", description, steady_bars(rows)),), needs_legend=False)


def split(rows: Sequence[Row], *keys: str) -> Iterator[tuple[Any, ...]]:
    """Group rows by some columns; yield the values of the columns, then the rows."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    for values, chosen in found.items():
        yield (*values, chosen)


def sweep_curves(
    rows: Iterable[Row], along: str, figure: str, beside: Sequence[Row] | None = None
) -> Figure:
    """Draw one panel: a figure of the results over load, size or demand.

    ``beside`` are the rows of all panels in the group, which share a scale. Each seed has a line,
    in the same style.
    """
    if along not in ALONG:
        raise UnknownNameError("axis", along, ALONG)
    if figure not in FIGURES:
        raise UnknownNameError("figure", figure, FIGURES)
    chosen = require_rows(rows, "curves")
    with house_style():
        drawing = Figure(figsize=(4.8, 3.3), layout="constrained")
        axes = drawing.subplots()
        for policy in distinct(chosen, "policy"):
            of_policy = [row for row in chosen if row["policy"] == policy]
            for seed in distinct(of_policy, "seed"):
                line = [row for row in of_policy if row["seed"] == seed]
                _draw(axes, sorted(line, key=lambda row: float(row[along])), along, figure)
        if all(math.isnan(value(row, figure)) for row in chosen):
            note_nothing_measured(axes)
        light_grid(axes)
        axes.set_ylabel(FIGURES[figure])
        axes.set_xlabel(ALONG[along])
        _scale_across(axes, chosen, along)
        _scale_up(axes, chosen if beside is None else beside, figure)
    return drawing


def swatch(policy: str) -> Figure:
    """Draw a piece of a policy's line, for a legend."""
    look = policy_style(policy)
    with house_style():
        drawing = Figure(figsize=(0.55, 0.2))
        axes = drawing.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.plot((0.02, 0.98), (0.5, 0.5), color=look.colour, linestyle=look.line, linewidth=1.8)
        axes.plot(
            0.5,
            0.5,
            color=look.colour,
            marker=look.marker,
            markersize=6,
            markerfacecolor=look.marker_face,
        )
    return drawing


def _draw(axes: Axes, line: Sequence[Row], along: str, figure: str) -> None:
    look = policy_style(str(line[0]["policy"]))
    places = [_place(row, along) for row in line]
    heights = np.array([value(row, figure) for row in line])
    # The interval of a share close to 0 or 1 may exceed it.
    low, high = np.clip([interval(row, figure) for row in line], 0, 1).T
    axes.plot(
        places,
        heights,
        color=look.colour,
        linestyle=look.line,
        linewidth=1.6,
        marker=look.marker,
        markersize=5,
        markerfacecolor=look.marker_face,
        label=plain(str(line[0]["policy"])),
        clip_on=False,
        zorder=3,
    )
    if len(line) > _MOST_WHISKERS:
        axes.fill_between(places, low, high, color=look.colour, alpha=0.15, linewidth=0)
        return
    whiskers = np.clip([heights - low, high - heights], 0, None)
    axes.errorbar(
        places, heights, whiskers, fmt="none", ecolor=look.colour, elinewidth=1, capsize=2.5
    )


def _place(row: Row, along: str) -> float:
    return float(row[along]) * (1 if along == "gpus" else 100)


def _scale_across(axes: Axes, rows: Sequence[Row], along: str) -> None:
    places = sorted({_place(row, along) for row in rows})
    if along == "gpus" and places[-1] >= 4 * places[0]:
        axes.set_xscale("log")
    if len(places) <= _MOST_TICKS:  # grid lines only at values that were run
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))


def _scale_up(axes: Axes, rows: Sequence[Row], figure: str) -> None:
    """Set a linear scale from zero, or a logarithmic one with zero if the values span much."""
    values = [value(row, figure) for row in rows]
    positive = [number for number in values if number > 0]
    ends = [min(interval(row, figure)[1], 1) for row in rows]
    highest = max([*positive, *(end for end in ends if end > 0)], default=0)
    if positive and max(positive) >= _WIDE_SPAN * min(positive):
        top = math.ceil(math.log10(highest))
        low = max(math.floor(math.log10(min(positive))), top - _DECADES)
        axes.set_yscale("symlog", linthresh=10.0**low, linscale=0.5)
        axes.yaxis.set_major_locator(FixedLocator([0, *(10.0**n for n in range(low, top + 1))]))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    axes.set_ylim(0, 1.08 * highest if highest else 1)
