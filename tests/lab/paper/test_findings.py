"""The sentences of the report follow the numbers."""

from typing import Any

import pytest

from slicewise.lab.paper.comparison import compare
from slicewise.lab.paper.findings import agreement, findings, leaders, outside


def sentence(sentences: list[str], start: str) -> str:
    (found,) = [each for each in sentences if each.startswith(start)]
    return found


def test_full_agreement_leaves_nothing_outside(make_rows: Any) -> None:
    comparison = make_rows().compared()
    assert outside(comparison) == []
    said = findings(comparison)
    assert said == [*agreement(comparison), *leaders(comparison)]
    assert sentence(said, "Acceptance rate").startswith(
        "Acceptance rate: 15 of 15 cells within 0.02."
    )
    assert "12 of 12 cells within 0.015" in sentence(said, "Scheduled workloads")
    assert "20 of 20 cells" in sentence(said, "Fragmentation")


def test_agreement_counts_and_names_the_largest_difference(make_rows: Any) -> None:
    changes = {
        ("acceptance_rate", "bimodal", "BF-BI"): 0.68,  # 0.06 below 0.74
        ("acceptance_rate", "skew-big", "RR"): 0.50,  # 0.10 above 0.40
        ("utilization_percent", "skew-small", "RR"): 54.18286,  # 2.2 above
    }
    said = agreement(make_rows(changes).compared())
    assert sentence(said, "Acceptance rate") == (
        "Acceptance rate: 13 of 15 cells within 0.02. Largest difference: "
        "RR for skew-big, 0.500 here against 0.400, 0.100 above."
    )
    assert sentence(said, "Utilization") == (
        "Utilization: 14 of 15 cells within 1 point. Largest difference: "
        "RR for skew-small, 54.183% here against 51.983%, 2.200 points above."
    )


def test_leaders_here_and_in_the_paper(make_rows: Any) -> None:
    assert leaders(make_rows().compared())[1] == (
        "The lowest fragmentation, here as in the paper: "
        "MFI (uniform, skew-small, skew-big, bimodal)."
    )
    changes = {("fragmentation", "uniform", "FF"): 0.01, ("fragmentation", "bimodal", "FF"): 0.02}
    assert leaders(make_rows(changes).compared())[1] == (
        "The lowest fragmentation: here FF (uniform, bimodal) and MFI (skew-small, skew-big); "
        "in the paper MFI (uniform, skew-small, skew-big, bimodal)."
    )


@pytest.mark.parametrize(
    "change",
    [
        {("fragmentation", "uniform", "MFI"): 0.36},  # within 15%
        {("scheduled_ratio_to_mfi", "skew-small", "FF"): 0.672},  # 0.012 below
        {("scheduled_ratio_to_mfi", "skew-small", "MFI"): 0.5},  # the reference is not judged
    ],
)
def test_a_difference_within_the_margin_is_not_mentioned(make_rows: Any, change: Any) -> None:
    assert outside(make_rows(change).compared()) == []


def test_cells_outside_their_margin_are_listed(make_rows: Any) -> None:
    changes = {
        ("acceptance_rate", "bimodal", "BF-BI"): 0.68,
        ("fragmentation", "uniform", "RR"): 3.22,
        ("fragmentation", "bimodal", "RR"): 3.0,
    }
    said = outside(make_rows(changes).compared())
    assert said == [
        "Acceptance rate: 1 cell lies outside the margin of 0.02: "
        "BF-BI bimodal 0.680 against 0.740.",
        "Fragmentation: 2 cells lie outside the margin of 15% of the published value: "
        "RR uniform 3.220 against 5.354, RR bimodal 3.000 against 4.917.",
    ]


def test_many_cells_are_counted_not_listed(make_rows: Any) -> None:
    changes = {
        ("utilization_percent", d, p): 40.0
        for d in ("skew-small", "skew-big")
        for p in ("MFI", "BF-BI", "WF-BI")
    }
    (said,) = outside(make_rows(changes).compared())
    assert said.startswith("Utilization: 6 cells lie outside the margin of 1 point: MFI skew-big ")
    assert said.endswith(", and 3 more.")


def test_little_input_gives_few_sentences() -> None:
    assert findings(compare([], [])) == []
    alone = {"distribution": "bimodal", "policy": "MFI", "demand": 0.85}
    only_mfi = compare([{**alone, "scheduled_ratio_to_mfi": 1.0, "acceptance_rate": 1.0}], [])
    (said,) = findings(only_mfi)  # no rivals to lead, no ratio to judge
    assert said.startswith("Acceptance rate: 1 of 1 cell within 0.02")
