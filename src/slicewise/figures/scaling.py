"""How the time of a decision grows with the cluster."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from slicewise.figures.rows import Row, distinct, require_rows
from slicewise.figures.style import house_style, light_grid, plain

_LOOK = {
    "compiled": ("#0072B2", "o", "slicewise, compiled"),
    "engine": ("#009E73", "s", "slicewise, Python engine"),
    "scan-compiled": ("#D55E00", "^", "scan of all GPUs, compiled"),
    "scan-numpy": ("#CC79A7", "v", "scan of all GPUs, NumPy"),
}


def scaling_curves(rows: Iterable[Row]) -> Figure:
    """Time of a decision and a release over the number of GPUs, both logarithmic."""
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
