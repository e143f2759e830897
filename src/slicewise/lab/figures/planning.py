"""Draws a plan: rejections over cluster size, and the GPUs each policy needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from slicewise.lab.figures.rows import Row, distinct, interval, require_rows, value
from slicewise.lab.figures.style import (
    INK,
    SOFT,
    house_style,
    light_grid,
    plain,
    policy_style,
)

_BELOW = 10.0
"""Curves are shown down to the target divided by this."""
_ABOVE = 100.0
"""Curves are shown up to the target times this."""
_FAR = 1.35
"""Policies that need more than this many times the minimum do not stretch the axis."""


def planning_curves(
    rows: Iterable[Row], curve: Iterable[Row], setting: Mapping[str, Any]
) -> Figure:
    """Draw, for each distribution, the rejected shares over size and the GPUs each policy needs.

    ``rows`` has a row per policy, ``curve`` one per policy and size. ``setting`` has the target
    and whether it counts ``requests`` or ``slices``.
    """
    answers, points = require_rows(rows, "a plan"), require_rows(curve, "curves")
    figure_name = "rejected_share" if setting["count"] == "requests" else "rejected_slices_share"
    distributions = distinct([{"of": row.get("distribution")} for row in answers], "of")
    most = max(sum(row.get("distribution") == d for row in answers) for d in distributions)
    with house_style():
        height = max(3.1, 1.3 + 0.36 * most)
        size = (11.0, 0.5 + height * len(distributions))
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        panels = figure.subplots(len(distributions), 2, squeeze=False, width_ratios=[1.15, 1])
        for (curves, needs), distribution in zip(panels, distributions, strict=True):
            mine = sorted(
                (row for row in answers if row.get("distribution") == distribution),
                key=_by_need,
            )
            drawn = [row for row in points if row.get("distribution") == distribution]
            _draw_curves(curves, mine, drawn, figure_name, setting)
            _draw_needs(needs, mine)
            if distribution is not None:
                curves.set_title(plain(f"{curves.get_title(loc='left')}: {distribution}"))
        for axes in panels[-1]:
            axes.set_xlabel("GPUs in the cluster")
        title = figure.suptitle(plain(str(setting["title"])), x=0.01, ha="left")
        title.set(fontweight="bold", fontsize=11)
    return figure


def _draw_curves(
    axes: Axes,
    rows: Sequence[Row],
    points: Sequence[Row],
    name: str,
    setting: Mapping[str, Any],
) -> None:
    target = float(setting["target_rejected_share"])
    seen_most = max(value(point, name) for point in points)
    lowest, highest = target / _BELOW, max(2 * target, min(1.5 * seen_most, target * _ABOVE))
    for row in rows:
        look = policy_style(row["policy"])
        line = sorted(
            (point for point in points if point["policy"] == row["policy"]),
            key=lambda point: point["gpus"],
        )
        gpus = np.array([point["gpus"] for point in line])
        shares = np.array([value(point, name) for point in line])
        ends = np.array([interval(point, name) for point in line])
        seen = shares > 0  # zero cannot be drawn on a logarithmic scale
        axes.fill_between(
            gpus[seen], *np.maximum(ends[seen], lowest / 10).T, color=look.colour, alpha=0.16, lw=0
        )
        axes.plot(gpus[seen], shares[seen], color=look.colour, linestyle=look.line, linewidth=1.8)
        if row["needed_gpus"] is not None:
            share = max(value(row, name), lowest * 1.15)
            axes.plot(
                [row["needed_gpus"]],
                [share],
                marker=look.marker,
                markersize=7,
                color=look.colour,
                markerfacecolor=look.marker_face,
                markeredgewidth=1.6,
                zorder=4,
            )
    axes.axhline(target, color=INK, linewidth=1.1, zorder=3)
    axes.annotate(
        f"target {100 * target:g}%",
        (0, target),
        xycoords=("axes fraction", "data"),
        xytext=(3, 4),
        textcoords="offset points",
        color=INK,
        fontsize=9,
    )
    axes.set_yscale("log")
    axes.set_ylim(lowest, highest)
    axes.yaxis.set_major_locator(LogLocator(10, (1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(*_reach(rows, points, name, highest))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    of = "requests" if setting["count"] == "requests" else "requested slices"
    axes.set_title(f"Share of {of} rejected")
    light_grid(axes)


def _reach(
    rows: Sequence[Row], points: Sequence[Row], name: str, highest: float
) -> tuple[float, float]:
    """Return the range of sizes to show, up to slightly more than what is needed."""
    needed = [row["needed_gpus"] for row in rows if row["needed_gpus"] is not None]
    sizes = [point["gpus"] for point in points]
    if not needed:
        return min(sizes), max(sizes) + 1
    shown = [size for size in needed if size <= _FAR * min(needed)]
    begin = min(
        (point["gpus"] for point in points if value(point, name) <= highest), default=min(sizes)
    )
    return begin, max(shown) + max(1.0, 0.12 * (max(shown) - begin))


def _draw_needs(axes: Axes, rows: Sequence[Row]) -> None:
    places = np.arange(len(rows))
    for place, row in zip(places, rows, strict=True):
        look = policy_style(row["policy"])
        needed = row["needed_gpus"]
        if needed is None:
            axes.annotate(
                "never", (0.02, place), xycoords=("axes fraction", "data"), va="center", color=SOFT
            )
            continue
        low, high = _ends(row)
        axes.plot(
            [low, high],
            [place, place],
            color=look.colour,
            linewidth=5,
            alpha=0.35,
            solid_capstyle="butt",
        )
        axes.plot(
            [needed],
            [place],
            marker=look.marker,
            markersize=8,
            color=look.colour,
            markerfacecolor=look.marker_face,
            markeredgewidth=1.6,
        )
        axes.annotate(
            _words(row),
            (max(high, needed), place),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    known = [end for row in rows if row["needed_gpus"] is not None for end in _ends(row)]
    if known:
        # The labels to the right of the points take about a third of the width.
        spread = max(max(known) - min(known), 0.05 * max(known), 1)
        axes.set_xlim(min(known) - 0.08 * spread, max(known) + 0.62 * spread)
    axes.set_yticks(places, [plain(str(row["policy"])) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_title(plain(f"GPUs needed, beside {rows[0]['compared_with']}"))
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _by_need(row: Row) -> tuple[bool, float]:
    """Sort key: fewest GPUs first, the limit last."""
    needed = row["needed_gpus"]
    return row["policy"] == "oracle", math.inf if needed is None else needed


def _ends(row: Row) -> tuple[float, float]:
    """Return the ends of the bar: the interval, or the range of sizes that meet by chance."""
    low, high = interval(row, "needed_gpus") if _whole(row) else (math.nan, math.nan)
    if math.isnan(low):
        low, high = value(row, "first_gpus"), value(row, "needed_gpus")
    return (value(row, "needed_gpus"), high) if math.isnan(low) else (low, high)


def _whole(row: Row) -> bool:
    """Return whether both ends of the interval are known."""
    ends = row.get("needed_gpus_ci95")
    return ends is not None and None not in ends


def _words(row: Row) -> str:
    """Format the size and the savings."""
    saved, share = row["saved_gpus"], row["saved_percent"]
    if not saved:
        return f"{row['needed_gpus']}"
    more = "fewer" if saved > 0 else "more"
    return f"{row['needed_gpus']}   {abs(saved)} {more} ({abs(share):.1f}%)"
