"""Line charts: figures over demand by policy, and decision times over cluster size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter

from slicewise.core.errors import UnknownNameError
from slicewise.lab.figures.rows import (
    LABELS,
    PANELS,
    Row,
    distinct,
    interval,
    require_rows,
    rows_of,
    value,
)
from slicewise.lab.figures.style import (
    house_style,
    legend_columns,
    light_grid,
    note_nothing_measured,
    plain,
    policy_style,
)

_DEMAND_AXIS = "demand row, by its lower edge (% of capacity requested)"
_HEADROOM = 1.03
"""An axis ends this much above the largest possible value, so that lines are not clipped."""


def demand_curves(rows: Iterable[Row], *distributions: str) -> Figure:
    """Draw scheduled workloads, acceptance, utilization and active GPUs over demand.

    One distribution has four panels in a square; several have a row of panels each.
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
            # Pages look for the id of a single title.
            gid = "figure-title" if count == 1 else f"figure-title-{number}"
            title.set(fontweight="bold", gid=gid)
        _legend(figure, figure.axes[0])
    return figure


def demand_curve(rows: Iterable[Row], distribution: str, figure: str) -> Figure:
    """Draw one figure of the results over demand."""
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


_LOOK = {
    "compiled": ("#0072B2", "o", "slicewise, compiled"),
    "engine": ("#009E73", "s", "slicewise, Python engine"),
    "scan-compiled": ("#D55E00", "^", "scan of all GPUs, compiled"),
    "scan-numpy": ("#CC79A7", "v", "scan of all GPUs, NumPy"),
}


def scaling_curves(rows: Iterable[Row]) -> Figure:
    """Draw the time of a decision and a release over the number of GPUs, both logarithmic."""
    every = require_rows(rows, "scaling")
    with house_style():
        figure = Figure(figsize=(8.4, 4.8), layout="constrained")
        axes = figure.subplots()
        policies = distinct(every, "policy")
        for path, (colour, marker, label) in _LOOK.items():
            for number, policy in enumerate(policies):
                line = [r for r in every if r["path"] == path and r["policy"] == policy]
                if line:
                    axes.plot(
                        [row["gpus"] for row in line],
                        [row["ns_per_decision"] / 1e3 for row in line],
                        color=colour,
                        marker=marker,
                        alpha=1 if number == 0 else 0.45,
                        label=label if number == 0 else None,
                    )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda gpus, _: f"{gpus:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time:,g}"))
        axes.set_xlabel("GPUs in the cluster")
        axes.set_ylabel("decision and release (microseconds)")
        load = every[0]["load"]
        axes.set_title(plain(f"{', '.join(policies)} at {100 * load:g}% sustained load"))
        light_grid(axes)
        axes.legend(frameon=False)
    return figure
