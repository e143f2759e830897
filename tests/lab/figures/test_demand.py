"""Lines over demand show the rows, and name missing ones."""

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.lab.figures.curves import demand_curve, demand_curves
from slicewise.lab.figures.save import svg_text

FIGURES = (
    "scheduled_ratio_to_mfi",
    "acceptance_rate",
    "utilization_percent",
    "active_gpus_percent",
)


def rows(distribution: str = "uniform", **changes: Any) -> list[dict[str, Any]]:
    made = []
    for number, policy in enumerate(("MFI", "FF")):
        for step in range(4):
            row: dict[str, Any] = {
                "distribution": distribution,
                "policy": policy,
                "demand": step / 4,
                "acceptance_rate": 1 - 0.1 * step * (number + 1),
                "scheduled_ratio_to_mfi": 1 - 0.01 * step * number,
                "utilization_percent": 20.0 * step + number,
                "active_gpus_percent": 25.0 * step + number,
                "fragmentation": 0.5 * step + number,
            }
            row |= {
                f"{f}_ci95": [row[f] - 0.01, row[f] + 0.01] for f in (*FIGURES, "fragmentation")
            }
            made.append(row | changes)
    return made


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
        )
        for line in axes.lines
    }


def test_several_distributions_are_stacked() -> None:
    given = [*rows(), *rows("bimodal", acceptance_rate=0.25)]
    figure = demand_curves(given, "bimodal", "uniform")
    titles = [str(part.get_suptitle()) for part in figure.subfigs]
    assert titles == ["Distribution: bimodal", "Distribution: uniform"]
    assert [len(part.axes) for part in figure.subfigs] == [4, 4]
    below = [lines(part.axes[1])["FF"][1] for part in figure.subfigs]
    assert below == [[0.25] * 4, [row["acceptance_rate"] for row in rows()[4:]]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["MFI", "FF"]
    text = svg_text(figure, "f", "a figure")
    assert text.count('id="f-figure-title-1"') == 1
    with pytest.raises(UnknownNameError, match="did you mean uniform"):
        demand_curves(given, "bimodal", "unifrom")


def test_each_panel_shows_its_column() -> None:
    given = rows()
    figure = demand_curves([*given, *rows("bimodal", acceptance_rate=0.0)], "uniform")
    assert len(figure.axes) == 4
    for axes, name in zip(figure.axes, FIGURES, strict=True):
        for policy in ("MFI", "FF"):
            x, y = lines(axes)[policy]
            assert x == [0, 25, 50, 75]
            assert y == [row[name] for row in given if row["policy"] == policy]


def test_the_band_is_the_interval() -> None:
    axes = demand_curve(rows(), "uniform", "utilization_percent").axes[0]
    corners = axes.collections[0].get_paths()[0].vertices
    assert isinstance(corners, np.ndarray)
    assert corners[:, 1].min() == pytest.approx(-0.01)
    assert corners[:, 1].max() == pytest.approx(60.01)


def test_one_figure_alone_has_its_name_in_the_title() -> None:
    figure = demand_curve(rows(), "uniform", "fragmentation")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Fragmentation: uniform"]
    assert lines(figure.axes[0])["FF"][1] == [1.0, 1.5, 2.0, 2.5]


def test_rows_may_come_in_any_order() -> None:
    figure = demand_curve(rows()[::-1], "uniform", "acceptance_rate")
    assert lines(figure.axes[0])["MFI"][0] == [0, 25, 50, 75]


def test_an_unmeasured_column_is_noted() -> None:
    given = rows(scheduled_ratio_to_mfi=None, scheduled_ratio_to_mfi_ci95=None)
    first, second, *_ = demand_curves(given, "uniform").axes
    assert [text.get_text() for text in first.texts] == ["not measured"]
    assert not second.texts


def test_a_value_without_an_interval_is_drawn() -> None:
    figure = demand_curve(rows(acceptance_rate_ci95=None), "uniform", "acceptance_rate")
    assert lines(figure.axes[0])["MFI"][1][0] == 1
    svg_text(figure, "x", "a figure")


def test_unknown_names_are_rejected() -> None:
    with pytest.raises(UnknownNameError, match="did you mean uniform"):
        demand_curves(rows(), "unifrom")
    with pytest.raises(UnknownNameError, match="did you mean acceptance_rate"):
        demand_curve(rows(), "uniform", "acceptance")
    with pytest.raises(SlicewiseError, match="no results"):
        demand_curves([], "uniform")
