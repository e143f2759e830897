"""Draws the rejections of a replay: by policy and reason, and by kind of request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from slicewise.lab.experiment import ORACLE
from slicewise.lab.figures.rows import Row, require_rows
from slicewise.lab.figures.style import INK, PAPER, SOFT, house_style, plain, policy_style

_REASONS = {
    "capacity": ("#56b4e9", ""),
    "fragmented": ("#d55e00", "////"),
    "unknown profile": ("#8a8f98", ".."),
    "quota": ("#cc79a7", "xx"),
}
"""By reason: colour and hatch; nothing depends on colour alone."""
_DARK = 0.6
"""Share from which a cell is dark enough for light text."""
_MOST_COLUMNS = 12
"""Maximum number of request kinds shown; a trace of needs may have hundreds."""
_SHADES = LinearSegmentedColormap.from_list("rejected", [PAPER, "#f0b48a", "#a63d00"])


def replay_bars(rows: Iterable[Row], setting: Mapping[str, Any]) -> Figure:
    """Draw rejected requests as bars by reason, and the rejected share of each kind.

    The oracle is dotted grey; it has no bar if it could not run.
    """
    given = require_rows(rows, "bars")
    every = [row for row in given if row["rejected_by_reason"]["capacity"] is not None]
    kinds = _most_asked(every)
    with house_style():
        size = (5.6 + 0.75 * len(kinds), 1.9 + 0.34 * len(every))
        figure = Figure(figsize=size, layout="constrained")
        widths = [4.0, 0.75 * len(kinds)]
        bars, cells = figure.subplots(1, 2, sharey=True, width_ratios=widths)
        _draw_bars(bars, every)
        _draw_cells(cells, every, kinds)
        title = figure.suptitle(plain(_title(setting)), x=0.01, ha="left")
        title.set(fontweight="bold", fontsize=10.5)
    return figure


def _title(setting: Mapping[str, Any]) -> str:
    parts = [f"{setting['gpus']} {setting['model']}", f"offered load {setting['offered_load']:.2f}"]
    if setting["scale"] is not None:
        parts.append(f"shares x {setting['scale']:g}")
    if setting["compress"] != 1:
        parts.append(f"arrivals compressed {setting['compress']:g} times")
    return ", ".join(parts)


def _most_asked(rows: Sequence[Row]) -> list[str]:
    """Return the most frequent kinds of requests, most frequent first; ties by name."""
    asked = rows[0]["by_profile"]
    return sorted(asked, key=lambda kind: (-asked[kind]["arrivals"], kind))[:_MOST_COLUMNS]


def _draw_bars(axes: Axes, rows: Sequence[Row]) -> None:
    places = np.arange(len(rows))
    left = np.zeros(len(rows))
    limit = np.array([row["policy"] == ORACLE for row in rows])
    look = policy_style(ORACLE)
    parts = [(reason, ~limit, *looks) for reason, looks in _REASONS.items()]
    for reason, applies, colour, hatch in [*parts, ("capacity", limit, look.colour, look.hatch)]:
        counts = [row["rejected_by_reason"].get(reason, 0) / row["arrivals"] for row in rows]
        shares = 100 * np.where(applies, counts, 0)
        if shares.any():
            axes.barh(
                places,
                shares,
                left=left,
                height=0.72,
                color=colour,
                hatch=hatch,
                edgecolor=PAPER,
                linewidth=0,
                label="even if all could be moved" if applies is limit else reason,
            )
        left += shares
    for place, total in zip(places, left, strict=True):
        axes.annotate(
            f"{total:.2f}",
            (total, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    axes.set_yticks(places, [plain(str(row["policy"])) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, max(1.18 * float(left.max()), 0.1))
    axes.set_title("Requests rejected, %")
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if left.any():
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


def _draw_cells(axes: Axes, rows: Sequence[Row], kinds: Sequence[str]) -> None:
    shares = np.array([[_share(row["by_profile"][kind]) for kind in kinds] for row in rows])
    axes.imshow(shares, cmap=_SHADES, vmin=0, vmax=1, aspect="auto")
    for (line, column), share in np.ndenumerate(shares):
        axes.text(
            column,
            line,
            f"{100 * share:.3g}",
            ha="center",
            va="center",
            color=PAPER if share > _DARK else SOFT if share == 0 else INK,
            fontsize=8.5,
        )
    asked = rows[0]["by_profile"]
    names = [f"{kind}\n({asked[kind]['arrivals']})" for kind in kinds]
    axes.set_xticks(range(len(kinds)), [plain(name) for name in names])
    # Rotated around their ends: long labels stay parallel instead of crossing.
    axes.tick_params(axis="x", rotation=35, labelsize=8)
    for label in axes.get_xticklabels():
        label.set(ha="right", rotation_mode="anchor")
    axes.tick_params(axis="both", length=0, labelleft=False)
    axes.set_title("Rejected share of each kind, %")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _share(counts: Mapping[str, int]) -> float:
    rejected = sum(number for name, number in counts.items() if name != "arrivals")
    return rejected / counts["arrivals"]
