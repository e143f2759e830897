"""Bars of the queueing experiment are waits by tenant and give-ups by profile."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.container import BarContainer

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.queueing import queueing_bars


def row(discipline: str, group: str, name: str, figure: float | None) -> dict[str, Any]:
    low_high = None if figure is None else [figure - 0.01, figure + 0.01]
    return {
        "scenario": "flood",
        "policy": "my$policy",
        "load": 0.95,
        "discipline": discipline,
        "group": group,
        "name": name,
        "mean_wait_lifetimes": figure,
        "mean_wait_lifetimes_ci95": low_high,
        "gave_up_share": figure,
        "gave_up_share_ci95": low_high,
    }


def test_bars_have_the_height_of_their_rows() -> None:
    rows = [
        row("fifo", "tenant", "ana", 0.2),
        row("fifo", "profile", "7g.80gb", 0.5),
        row("fair", "tenant", "ana", 0.1),
        row("fair", "profile", "7g.80gb", None),
    ]
    waits, gave_up = queueing_bars(rows).axes
    for axes, expected in ((waits, {"fifo": 0.2, "fair": 0.1}), (gave_up, {"fifo": 0.5})):
        bars = {
            str(group.get_label()): [bar.get_height() for bar in group]
            for group in axes.containers
            if isinstance(group, BarContainer)
        }
        for discipline, height in expected.items():
            assert bars[discipline] == [height]
    assert [text.get_text() for text in gave_up.get_xticklabels()] == ["7g.80gb"]
    assert waits.get_title(loc="left") == r"Wait by tenant: flood, my\$policy, load 0.95"


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(SlicewiseError, match="no results to draw"):
        queueing_bars([])
