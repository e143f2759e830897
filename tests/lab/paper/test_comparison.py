"""Comparisons worked out by hand."""

from typing import Any

import pytest

from slicewise.lab.paper.comparison import QUANTITIES, Cell, compare, side_by_side

BY_KEY = {quantity.key: quantity for quantity in QUANTITIES}


def row(policy: str, distribution: str = "bimodal", demand: float = 0.85, **values: Any) -> Any:
    return {"distribution": distribution, "policy": policy, "demand": demand, **values}


def test_a_cell_holds_both_values_their_difference_and_the_verdict() -> None:
    # Published for bimodal: BF-BI 0.74, FF 0.72.
    rows = [
        row("BF-BI", acceptance_rate=0.69, acceptance_rate_ci95=[0.68, 0.70]),
        row("FF", acceptance_rate=0.74, acceptance_rate_ci95=None),
    ]
    bf, ff = compare(rows, []).cells
    assert (bf.figure, bf.distribution, bf.policy) == ("acceptance_rate", "bimodal", "BF-BI")
    assert (bf.published, bf.ours, bf.interval) == (0.74, 0.69, (0.68, 0.70))
    assert bf.difference == pytest.approx(-0.05)
    assert not bf.within
    assert ff.interval is None
    assert ff.difference == pytest.approx(0.02)
    assert ff.within  # exactly the margin


def test_scheduled_workloads_are_compared_as_ratios() -> None:
    rows = [row("MFI", scheduled_ratio_to_mfi=1.0), row("BF-BI", scheduled_ratio_to_mfi=0.735)]
    mfi, bf = compare(rows, []).of("scheduled_ratio_to_mfi")
    assert mfi.is_reference
    assert mfi.published == 1
    assert bf.published == pytest.approx(0.81216, abs=1e-5)  # 78.78 / 97.0
    assert bf.difference == pytest.approx(-0.07716, abs=1e-5)
    assert not bf.within
    assert compare(rows, []).judged("scheduled_ratio_to_mfi") == (bf,)


@pytest.mark.parametrize(
    ("key", "published", "inside", "outside"),
    [
        ("acceptance_rate", 0.5, 0.52, 0.521),
        ("scheduled_ratio_to_mfi", 0.5, 0.485, 0.484),
        ("utilization_percent", 50, 51, 51.01),
        ("active_gpus_percent", 50, 48.5, 48.49),
        ("fragmentation", 0.2, 0.23, 0.231),  # 15% of it
        ("fragmentation", 4.0, 3.4, 3.39),
    ],
)
def test_the_margins(key: str, published: float, inside: float, outside: float) -> None:
    def within(ours: float) -> bool:
        return Cell(BY_KEY[key], "d", "p", published, ours, None).within

    assert within(published)
    assert within(inside)
    assert not within(outside)


def test_only_the_row_at_85_percent_counts_and_fragmentation_is_the_average() -> None:
    rows = [
        row("RR", demand=0.8, acceptance_rate=0.1, fragmentation=1.0),
        row("RR", demand=0.85, acceptance_rate=0.2, fragmentation=2.0),
        row("RR", demand=0.9, acceptance_rate=0.3, fragmentation=3.0),
    ]
    averaged = [{"distribution": "bimodal", "policy": "RR", "fragmentation": 4.5}]
    cells = compare(rows, averaged).cells
    assert [(cell.figure, cell.ours) for cell in cells] == [
        ("acceptance_rate", 0.2),
        ("fragmentation", 4.5),
    ]


def test_numbers_of_one_side_only_are_skipped() -> None:
    rows = [
        row("mfi-overlap", acceptance_rate=0.9),
        row("RR", distribution="mine", acceptance_rate=0.9),
        row("RR", distribution="uniform", acceptance_rate=0.9),  # not published at 85%
        row("RR", acceptance_rate=None, utilization_percent=float("nan")),
    ]
    assert compare(rows, []).cells == ()
    assert compare([], []).quantities == ()


def test_everything_the_paper_has_is_compared(make_rows: Any) -> None:
    comparison = make_rows().compared()
    assert len(comparison.cells) == 4 * 15 + 20
    assert comparison.quantities == QUANTITIES
    assert comparison.agreeing == 80
    assert all(cell.within for cell in comparison.cells)
    assert {cell.difference for cell in comparison.cells} == {0.0}


def test_margins_are_formatted() -> None:
    assert BY_KEY["acceptance_rate"].margin_text == "0.02"
    assert BY_KEY["utilization_percent"].margin_text == "1 point"
    assert BY_KEY["active_gpus_percent"].margin_text == "1.5 points"
    assert BY_KEY["fragmentation"].margin_text == "15% of the published value"


def test_readings_are_put_side_by_side() -> None:
    averaged = [{"distribution": "uniform", "policy": "RR", "fragmentation": 5.0}]
    data = compare([row("MFI", acceptance_rate=1.0), row("RR", acceptance_rate=0.44)], averaged)
    text = compare([row("RR", acceptance_rate=0.5)], [])
    assert (data.agreeing, text.agreeing) == (3, 0)
    mfi, rr, f = side_by_side({"data": data, "text": text})
    assert (mfi.policy, mfi.published, list(mfi.cells)) == ("MFI", 0.995, ["data"])
    assert (rr.policy, rr.published) == ("RR", 0.45)
    assert {name: cell.ours for name, cell in rr.cells.items()} == {"data": 0.44, "text": 0.5}
    assert (f.quantity.key, f.distribution) == ("fragmentation", "uniform")
    assert not any(line.is_reference for line in (mfi, rr, f))
    ratios = compare([row("MFI", scheduled_ratio_to_mfi=1.0)], [])
    assert [line.is_reference for line in side_by_side({"data": ratios})] == [True]
