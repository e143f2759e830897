"""The drawing of a plan: curves end at their rows, and each policy's need is labelled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.planning import planning_curves
from slicewise.lab.figures.save import svg_text

SETTING = {"target_rejected_share": 0.01, "count": "requests", "title": "Demand of 5 $mine"}


def answer(policy: str, needed: int | None, saved: int | None = 0, **more: Any) -> dict[str, Any]:
    known = needed is not None
    interval = None if needed is None else [needed - 1, needed + 2]
    return {
        "policy": policy,
        "distribution": "uniform",
        "needed_gpus": needed,
        "needed_gpus_ci95": interval,
        "rejected_share": 0.008 if known else None,
        "rejected_slices_share": 0.016 if known else None,
        "compared_with": "first-fit",
        "saved_gpus": saved,
        "saved_percent": None if saved is None else 2.5 * saved,
    } | more


def curve(
    policy: str, *shares: float, distribution: str | None = "uniform"
) -> list[dict[str, Any]]:
    return [
        {
            "policy": policy,
            "distribution": distribution,
            "gpus": 40 + 2 * at,
            "rejected_share": share,
            "rejected_share_ci95": [share / 2, 2 * share],
            "rejected_slices_share": 2 * share,
            "rejected_slices_share_ci95": [share, 4 * share],
        }
        for at, share in enumerate(shares)
    ]


ROWS = [answer("first-fit", 46), answer("mfi", 44, 2), answer("oracle", 42, 4)]
CURVE = [
    *curve("first-fit", 0.1, 0.05, 0.02, 0.008, 0.001),
    *curve("mfi", 0.05, 0.02, 0.008, 0.001, 0.0),
    *curve("oracle", 0.02, 0.008, 0.001, 0.0, 0.0),
]


def test_curves_show_the_shares_without_zeros() -> None:
    figure = planning_curves(ROWS, CURVE, SETTING)
    curves, needs = figure.axes
    drawn = {
        tuple(np.asarray(line.get_xdata()).tolist()): np.asarray(line.get_ydata()).tolist()
        for line in curves.lines
    }
    assert drawn[40, 42, 44, 46, 48] == [0.1, 0.05, 0.02, 0.008, 0.001]
    assert drawn[40, 42, 44, 46] == [0.05, 0.02, 0.008, 0.001]
    assert drawn[40, 42, 44] == [0.02, 0.008, 0.001]
    assert drawn[46,] == drawn[44,] == drawn[42,] == [0.008]
    assert drawn[0, 1] == [0.01, 0.01], "the target"
    assert [text.get_text() for text in curves.texts] == ["target 1%"]
    assert curves.get_yscale() == "log"
    assert curves.get_title(loc="left") == "Share of requests rejected: uniform"
    assert needs.get_title(loc="left") == "GPUs needed, beside first-fit"
    assert figure.get_suptitle() == r"Demand of 5 \$mine"


def test_needs_are_sorted_with_the_limit_last() -> None:
    needs = planning_curves(ROWS, CURVE, SETTING).axes[1]
    assert [label.get_text() for label in needs.get_yticklabels()] == ["mfi", "first-fit", "oracle"]
    assert [text.get_text() for text in needs.texts] == [
        "44   2 fewer (5.0%)",
        "46",
        "42   4 fewer (10.0%)",
    ]
    bars = [np.asarray(line.get_xdata()).tolist() for line in needs.lines[::2]]
    assert bars == [[43, 46], [45, 48], [41, 44]]
    left, right = needs.get_xlim()
    assert left < 41
    assert right > 48


def test_slices_are_drawn_when_they_are_counted() -> None:
    curves = planning_curves(ROWS, CURVE, {**SETTING, "count": "slices"}).axes[0]
    assert np.asarray(curves.lines[0].get_ydata()).tolist() == [0.1, 0.04, 0.016, 0.002]
    assert curves.get_title(loc="left").startswith("Share of requested slices rejected")


def test_a_recording_has_no_interval_but_sizes_left_to_chance() -> None:
    more = {"needed_gpus_ci95": None, "distribution": None}
    rows = [
        answer("first-fit", 46, first_gpus=42, **more),
        answer("worst-fit", 70, -24, first_gpus=70, **more),
    ]
    points = curve("first-fit", 0.1, 0.01, 0.02, 0.008, distribution=None)
    points += curve("worst-fit", 0.5, 0.4, distribution=None)
    for row in rows:
        del row["distribution"]
    for point in points:
        del point["distribution"], point["rejected_share_ci95"]
    figure = planning_curves(rows, points, SETTING)
    curves, needs = figure.axes
    assert curves.get_title(loc="left") == "Share of requests rejected"
    bars = [np.asarray(line.get_xdata()).tolist() for line in needs.lines[::2]]
    assert bars == [[42, 46], [70, 70]]
    assert needs.texts[1].get_text() == "70   24 more (60.0%)"
    assert curves.get_xlim()[1] < 70, "who needs far more does not stretch the curves"
    assert svg_text(figure, "plan", "a figure").startswith("<svg")


def test_a_policy_that_never_meets_the_target_and_one_run() -> None:
    rows = [answer("never", None, None), answer("first-fit", 46, needed_gpus_ci95=None)]
    points = [*curve("never", 0.9, 0.8), *curve("first-fit", 0.1, 0.05, 0.02, 0.008)]
    needs = planning_curves(rows, points, SETTING).axes[1]
    assert [text.get_text() for text in needs.texts] == ["46", "never"]
    assert np.asarray(needs.lines[0].get_xdata()).tolist() == [46, 46]
    alone = planning_curves(rows[:1], points[:2], SETTING)
    assert alone.axes[0].get_xlim() == (40, 43)


def test_an_open_interval_is_drawn_as_far_as_it_is_known() -> None:
    rows = [answer("first-fit", 46, needed_gpus_ci95=[44, None])]
    needs = planning_curves(rows, CURVE[:5], SETTING).axes[1]
    assert np.asarray(needs.lines[0].get_xdata()).tolist() == [46, 46]


def test_a_row_of_panels_for_each_distribution() -> None:
    rows = [*ROWS, *(row | {"distribution": "bimodal"} for row in ROWS)]
    points = [*CURVE, *(point | {"distribution": "bimodal"} for point in CURVE)]
    figure = planning_curves(rows, points, SETTING)
    assert [axes.get_title(loc="left") for axes in figure.axes[::2]] == [
        "Share of requests rejected: uniform",
        "Share of requests rejected: bimodal",
    ]


def test_no_rows_are_an_error() -> None:
    with pytest.raises(SlicewiseError, match="no results to draw a plan from"):
        planning_curves([], CURVE, SETTING)
    with pytest.raises(SlicewiseError, match="no results to draw curves from"):
        planning_curves(ROWS, [], SETTING)
