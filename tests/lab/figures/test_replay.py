"""Bars match the rows, by reason, and every kind of request has its cell."""

from typing import Any

import pytest
from matplotlib.container import BarContainer

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.replay import replay_bars

SETTING = {"gpus": 8, "model": "A100-80GB", "offered_load": 0.5, "scale": 0.4, "compress": 10.0}


def row(policy: str, small: tuple[int, int], large: tuple[int, int]) -> dict[str, Any]:
    def kind(arrivals: int, capacity: int, fragmented: int) -> dict[str, int]:
        return {"arrivals": arrivals, "capacity": capacity, "fragmented": fragmented}

    return {
        "policy": policy,
        "arrivals": 50,
        "rejected_by_reason": {
            "capacity": small[0] + large[0],
            "fragmented": small[1] + large[1],
        },
        "by_profile": {"8 x 7g.80gb": kind(10, *large), "1g.10gb": kind(40, *small)},
    }


def test_bars_are_the_rejected_shares_by_reason() -> None:
    figure = replay_bars([row("mfi", (4, 1), (5, 0)), row("my$policy", (0, 0), (0, 10))], SETTING)
    bars, cells = figure.axes
    widths = {
        str(group.get_label()): [bar.get_width() for bar in group]
        for group in bars.containers
        if isinstance(group, BarContainer)
    }
    assert widths == {"capacity": [18, 0], "fragmented": [2, 20]}
    assert [text.get_text() for text in bars.texts] == ["20.00", "20.00"]
    assert [text.get_text() for text in cells.texts] == ["12.5", "50", "0", "100"]
    names = [text.get_text() for text in cells.get_xticklabels()]
    assert names == ["1g.10gb\n(40)", "8 x 7g.80gb\n(10)"]
    title = figure.get_suptitle()
    assert "compressed 10 times" in title
    assert "shares x 0.4" in title


def test_the_limit_has_its_own_style_or_no_bar() -> None:
    def limit(rejected: int | None) -> dict[str, Any]:
        counts = {"capacity": rejected, "fragmented": None if rejected is None else 0}
        kinds = {"1g.10gb": {"arrivals": 40, **counts}, "8 x 7g.80gb": {"arrivals": 10, **counts}}
        return {
            "policy": "oracle",
            "arrivals": 50,
            "rejected_by_reason": counts,
            "by_profile": kinds,
        }

    bars, _ = replay_bars([row("mfi", (4, 1), (5, 0)), limit(2)], SETTING).axes
    looks = {
        str(group.get_label()): ([bar.get_width() for bar in group], group[0].get_hatch())
        for group in bars.containers
        if isinstance(group, BarContainer)
    }
    assert looks == {
        "capacity": ([18, 0], ""),
        "fragmented": ([2, 0], "////"),
        "even if all could be moved": ([0, 4], "...."),
    }
    assert [text.get_text() for text in bars.get_yticklabels()] == ["mfi", "oracle"]
    bars, cells = replay_bars([row("mfi", (4, 1), (5, 0)), limit(None)], SETTING).axes
    assert [text.get_text() for text in bars.get_yticklabels()] == ["mfi"]
    assert len(cells.texts) == 2


def test_nothing_rejected_and_nothing_to_draw() -> None:
    plain = {**SETTING, "scale": None, "compress": 1.0}
    figure = replay_bars([row("mfi", (0, 0), (0, 0))], plain)
    assert figure.get_suptitle() == "8 A100-80GB, offered load 0.50"
    with pytest.raises(SlicewiseError, match="no results to draw"):
        replay_bars([], SETTING)
