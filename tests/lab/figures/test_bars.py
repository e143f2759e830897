"""Bars have the height of their rows, and small ones are visible."""

from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.bars import bars_at_demand, fragmentation_bars, steady_bars

PANELS = (
    "scheduled_ratio_to_mfi",
    "acceptance_rate",
    "utilization_percent",
    "active_gpus_percent",
)
POLICIES = ("MFI", "FF", "RR")


def rows() -> list[dict[str, Any]]:
    made = []
    for d, distribution in enumerate(("uniform", "bimodal")):
        for p, policy in enumerate(POLICIES):
            for demand in (0.8, 0.85):
                base = 0.1 + 0.2 * d + 0.1 * p + demand / 10
                values = dict(zip(PANELS, (base, base / 2, 100 * base, 90 * base), strict=True))
                row: dict[str, Any] = {"distribution": distribution, "policy": policy}
                row |= {"demand": demand, **values}
                row |= {f"{name}_ci95": [0.9 * v, 1.2 * v] for name, v in values.items()}
                made.append(row)
    return made


def fragmentation(*values: float) -> list[dict[str, Any]]:
    return [
        {"distribution": "uniform", "policy": policy, "fragmentation": value}
        for policy, value in zip(POLICIES, values, strict=False)
    ]


def heights(axes: Axes) -> dict[str, list[float]]:
    return {
        str(bars.get_label()): [bar.get_height() for bar in bars]
        for bars in axes.containers
        if isinstance(bars, BarContainer)
    }


def diamonds(axes: Axes) -> list[list[float]]:
    drawn = [line for line in axes.lines if line.get_marker() == "D"]
    return [list(map(float, line.get_ydata())) for line in drawn]  # type: ignore[arg-type]


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_heights_are_the_values_at_that_demand() -> None:
    figure = bars_at_demand(rows())
    assert len(figure.axes) == 4
    for axes, name in zip(figure.axes, PANELS, strict=True):
        assert heights(axes) == {
            policy: [
                row[name] for row in rows() if row["policy"] == policy and row["demand"] == 0.85
            ]
            for policy in POLICIES
        }
        assert axes.get_ylim()[0] == 0
    assert legend(figure) == list(POLICIES)
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["uniform", "bimodal"]


def test_whiskers_end_where_the_interval_does() -> None:
    axes = bars_at_demand(rows()).axes[0]
    (low, high) = axes.collections[0].get_segments()[0][:, 1]  # type: ignore[attr-defined]
    value = rows()[1]["scheduled_ratio_to_mfi"]
    assert (low, high) == (pytest.approx(0.9 * value), pytest.approx(1.2 * value))


def test_published_values_are_marked_where_there_are_some() -> None:
    published = {"acceptance_rate": {"bimodal": {"MFI": 0.5, "FF": 0.25}}}
    figure = bars_at_demand(rows(), published=published)
    assert diamonds(figure.axes[0]) == []
    drawn = diamonds(figure.axes[1])
    assert [values[1] for values in drawn] == [0.5, 0.25]
    assert all(values[0] != values[0] for values in drawn)  # NaN: nothing for uniform
    assert legend(figure)[-1] == "published"


def test_another_demand_can_be_drawn_and_a_missing_one_is_refused() -> None:
    assert heights(bars_at_demand(rows(), 0.8).axes[0])["MFI"][0] == pytest.approx(0.18)
    with pytest.raises(SlicewiseError, match=r"no results at demand 0\.5; known: 0\.8, 0\.85"):
        bars_at_demand(rows(), 0.5)
    with pytest.raises(SlicewiseError, match="no results to draw"):
        bars_at_demand([])


def test_fragmentation_of_one_size_has_a_linear_scale_from_zero() -> None:
    (axes,) = fragmentation_bars(fragmentation(1.0, 2.0, 3.0)).axes
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0
    assert heights(axes) == {"MFI": [1.0], "FF": [2.0], "RR": [3.0]}


def test_small_fragmentation_stays_visible() -> None:
    (axes,) = fragmentation_bars(fragmentation(0.004, 2.0, 5.0)).axes
    assert axes.get_yscale() == "log"
    assert axes.get_ylim()[0] == pytest.approx(0.001)
    assert heights(axes)["MFI"] == [0.004]


def test_published_values_count_when_the_scale_is_chosen() -> None:
    published = {"fragmentation": {"uniform": {"MFI": 90.0}}}
    (axes,) = fragmentation_bars(fragmentation(1.0, 2.0), published).axes
    assert axes.get_yscale() == "log"
    assert diamonds(axes) == [[90.0]]
    assert axes.get_ylim()[1] > 90


def test_zero_is_written_out() -> None:
    (axes,) = fragmentation_bars(fragmentation(0.0, 0.0)).axes
    assert [text.get_text() for text in axes.texts] == ["0", "0"]


def test_unmeasured_values_are_noted() -> None:
    given = [row | {"scheduled_ratio_to_mfi": None} for row in rows()]
    assert [text.get_text() for text in bars_at_demand(given).axes[0].texts] == ["not measured"]


def test_steady_has_a_panel_for_each_load() -> None:
    given = [
        {"policy": policy, "distribution": "uniform", "load": load, "rejected_share": share}
        for load in (0.7, 0.9)
        for policy, share in (("mfi", 0.001), ("best-fit", load / 10))
    ]
    figure = steady_bars(given)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Offered load: 70% of capacity",
        "Offered load: 90% of capacity",
    ]
    assert heights(figure.axes[1]) == {"mfi": [0.001], "best-fit": [0.9 / 10]}
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].yaxis.get_major_formatter()(0.01, 0) == "1%"


def test_a_custom_distribution_has_a_line_per_profile() -> None:
    row = {"policy": "mfi", "load": 0.9, "rejected_share": 0.1}
    figure = steady_bars([row | {"distribution": name} for name in ("uniform", "1g=0.5,2g=0.5")])
    shown = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert shown == ["uniform", "1g=0.5,\n2g=0.5"]


def test_the_limit_has_its_own_style_and_only_bars_where_it_ran() -> None:
    given: list[dict[str, Any]] = [
        {"policy": policy, "distribution": "uniform", "load": 0.9, "rejected_share": share}
        for policy, share in (("mfi", 0.02), ("oracle", 0.01))
    ]
    figure = steady_bars(given)
    assert legend(figure) == ["mfi", "oracle"]
    drawn = [bars for bars in figure.axes[0].containers if isinstance(bars, BarContainer)]
    assert [bars[0].get_hatch() or "" for bars in drawn] == ["", "...."]
    given[1]["rejected_share"] = None
    assert legend(steady_bars(given)) == ["mfi"]


def test_a_missing_cell_leaves_its_place_empty() -> None:
    given = [row for row in rows() if (row["distribution"], row["policy"]) != ("uniform", "FF")]
    shown = heights(bars_at_demand(given).axes[0])["FF"]
    assert shown[0] != shown[0]
    assert shown[1] == rows()[9]["scheduled_ratio_to_mfi"]
