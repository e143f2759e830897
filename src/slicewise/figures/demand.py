"""How the figures change as demand grows: a line for each policy, with its 95% interval."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from slicewise.core.errors import UnknownNameError
from slicewise.figures.labels import LABELS, PANELS
from slicewise.figures.rows import Row, distinct, interval, require_rows, rows_of, value
from slicewise.figures.style import (
    house_style,
    legend_columns,
    light_grid,
    note_nothing_measured,
    plain,
    policy_style,
)

_DEMAND_AXIS = "demand row, by its lower edge (% of capacity requested)"
_HEADROOM = 1.03
"""How far above the largest possible value an axis ends, so that lines there are seen whole."""


def demand_curves(rows: Iterable[Row], *distributions: str) -> Figure:
    """Scheduled workloads, acceptance, utilization and active GPUs over demand, in four panels.

    Several distributions stand one below the other, the panels of each in a row.
    """
    every = require_rows(rows, "curves")
    count = len(distributions)
    shape, size = ((2, 2), (10.0, 7.4)) if count == 1 else ((1, 4), (18.0, 0.6 + 4.2 * count))
    with house_style():
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        parts = [figure] if count == 1 else figure.subfigures(count, 1, squeeze=False).flat
        for number, (part, distribution) in enumerate(zip(parts, distributions, strict=True)):
            chosen = rows_of(every, distribution)
            panels = part.subplots(*shape, sharex=True)
            for axes, name in zip(panels.flat, PANELS, strict=True):
                _draw(axes, chosen, name)
            for axes in np.atleast_2d(panels)[-1]:
                axes.set_xlabel(_DEMAND_AXIS)
            title = part.suptitle(plain(f"Distribution: {distribution}"), x=0.01, ha="left")
            # An id is there once; of several, the pages that look for it have no use.
            gid = "figure-title" if count == 1 else f"figure-title-{number}"
            title.set(fontweight="bold", gid=gid)
        _legend(figure, figure.axes[0])
    return figure


def demand_curve(rows: Iterable[Row], distribution: str, figure: str) -> Figure:
    """One figure of the results over demand."""
    if figure not in LABELS:
        raise UnknownNameError("figure", figure, LABELS)
    chosen = rows_of(require_rows(rows, "curves"), distribution)
    with house_style():
        drawing = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = drawing.subplots()
        _draw(axes, chosen, figure)
        axes.set_title(plain(f"{LABELS[figure].title}: {distribution}"))
        axes.set_xlabel(_DEMAND_AXIS)
        _legend(drawing, axes)
    return drawing


def _draw(axes: Axes, rows: Sequence[Row], figure: str) -> None:
    label = LABELS[figure]
    axes.set_title(label.title)
    axes.set_ylabel(label.axis)
    light_grid(axes)
    for policy in distinct(rows, "policy"):
        line = sorted((r for r in rows if r["policy"] == policy), key=lambda row: row["demand"])
        demand = np.array([100 * row["demand"] for row in line])
        look = policy_style(policy)
        ends = np.array([interval(row, figure) for row in line])
        axes.fill_between(demand, *ends.T, color=look.colour, alpha=0.18, linewidth=0)
        axes.plot(
            demand,
            np.array([value(row, figure) for row in line]),
            color=look.colour,
            linestyle=look.line,
            linewidth=1.8,
            marker=look.marker,
            markersize=5,
            markerfacecolor=look.marker_face,
            markevery=2,
            label=plain(policy),
        )
    axes.set_xlim(-2.5, 100)
    axes.margins(y=0.08)
    lowest, highest = axes.get_ylim()
    top = highest if label.top is None else label.top * _HEADROOM
    axes.set_ylim(lowest if label.top == 1 else 0, top)
    if all(np.isnan(value(row, figure)) for row in rows):
        note_nothing_measured(axes)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    columns = legend_columns(names, figure.get_figwidth())
    figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=3)
