"""Bars are the mean waits, and the markers above them the long ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.container import BarContainer

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.bars import waiting_bars


def row(policy: str, distribution: str, mean: float | None) -> dict[str, Any]:
    return {
        "policy": policy,
        "distribution": distribution,
        "mean_wait_lifetimes": mean,
        "mean_wait_lifetimes_ci95": None if mean is None else [mean - 0.01, mean + 0.01],
        "wait_p95_lifetimes": 0.5,
        "wait_p99_lifetimes": 0.75,
    }


def test_bars_are_mean_waits() -> None:
    rows = [row("mfi", "uniform", 0.2), row("my$policy", "uniform", 0.1), row("mfi", "b", None)]
    (axes,) = waiting_bars(rows).axes
    heights = {
        str(group.get_label()): [bar.get_height() for bar in group]
        for group in axes.containers
        if isinstance(group, BarContainer)
    }
    assert heights["mfi"][0] == 0.2
    assert heights[r"my\$policy"][0] == 0.1
    shown = {str(line.get_marker()): np.asarray(line.get_ydata())[0] for line in axes.lines}
    assert (shown["_"], shown["v"]) == (0.5, 0.75)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["uniform", "b"]


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(SlicewiseError, match="no results to draw"):
        waiting_bars([])
