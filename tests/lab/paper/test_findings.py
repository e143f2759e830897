"""The sentences of the report follow the numbers."""

from typing import Any

import pytest

from slicewise.lab.paper.comparison import compare
from slicewise.lab.paper.findings import agreement, findings, leaders, readings, unexplained


def sentence(sentences: list[str], start: str) -> str:
    (found,) = [each for each in sentences if each.startswith(start)]
    return found


def test_full_agreement_leaves_nothing_to_explain(make_rows: Any) -> None:
    comparison = make_rows().compared()
    assert unexplained(comparison) == []
    said = findings(comparison)
    assert said == [*agreement(comparison), *leaders(comparison)]
    assert sentence(said, "Acceptance rate").startswith(
        "Acceptance rate: 15 of 15 cells within 0.04 and 15 within 0.08."
    )
    assert "12 of 12 cells within 0.06" in sentence(said, "Scheduled workloads")
    assert "20 of 20 cells" in sentence(said, "Fragmentation")


def test_agreement_counts_both_margins_and_names_the_largest_difference(make_rows: Any) -> None:
    changes = {
        ("acceptance_rate", "bimodal", "BF-BI"): 0.68,  # 0.06 below 0.74
        ("acceptance_rate", "skew-big", "RR"): 0.50,  # 0.10 above 0.40
        ("utilization_percent", "skew-small", "RR"): 54.18286,  # 2.2 above
    }
    said = agreement(make_rows(changes).compared())
    assert sentence(said, "Acceptance rate") == (
        "Acceptance rate: 13 of 15 cells within 0.04 and 14 within 0.08. Largest difference: "
        "RR for skew-big, 0.500 here against 0.400, 0.100 above."
    )
    assert sentence(said, "Utilization") == (
        "Utilization: 15 of 15 cells within 3 points. Largest difference: "
        "RR for skew-small, 54.2% here against 52.0%, 2.2 points above."
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


def test_policies_that_schedule_less_are_named(make_rows: Any) -> None:
    # Published: FF 66.6/97.3 = 0.684 for skew-small, BF-BI 0.812 for bimodal.
    changes = {
        ("scheduled_ratio_to_mfi", "skew-small", "FF"): 0.63,
        ("scheduled_ratio_to_mfi", "bimodal", "BF-BI"): 0.73,
    }
    (said,) = unexplained(make_rows(changes).compared())
    assert said == (
        "FF and BF-BI schedule less than published for skew-small and bimodal: 0.054 to 0.082 "
        "below, relative to MFI (BF-BI bimodal 0.730 against 0.812, FF skew-small 0.630 against "
        "0.684). No reading of the paper that was tried explains it."
    )
    del changes["scheduled_ratio_to_mfi", "bimodal", "BF-BI"]
    (said,) = unexplained(make_rows(changes).compared())
    assert said.startswith("FF schedules less than published for skew-small: 0.054 below")


def test_policies_with_far_less_fragmentation_are_named(make_rows: Any) -> None:
    changes = {("fragmentation", "uniform", "MFI"): 0.0174}
    (said,) = unexplained(make_rows(changes).compared())
    assert said == (
        "Policies that pack leave far less fragmentation here than published: MFI for uniform "
        "(MFI uniform 0.017 against 0.414). No reading of the paper that was tried explains it."
    )


@pytest.mark.parametrize(
    "change",
    [
        {("fragmentation", "uniform", "MFI"): 0.32},  # within 0.1
        {("scheduled_ratio_to_mfi", "skew-small", "FF"): 0.67},  # 0.014 below
        {("scheduled_ratio_to_mfi", "skew-small", "FF"): 0.74},  # above
        {("scheduled_ratio_to_mfi", "skew-small", "WF-BI"): 0.92},  # another policy, in margin
    ],
)
def test_a_difference_within_the_margin_is_not_mentioned(make_rows: Any, change: Any) -> None:
    assert unexplained(make_rows(change).compared()) == []


def test_other_cells_outside_their_margin_are_listed(make_rows: Any) -> None:
    changes = {
        ("acceptance_rate", "bimodal", "BF-BI"): 0.68,
        ("fragmentation", "uniform", "MFI"): 0.0174,
        ("fragmentation", "uniform", "RR"): 3.22,
        ("fragmentation", "bimodal", "RR"): 3.0,
    }
    said = unexplained(make_rows(changes).compared())
    assert len(said) == 3
    assert said[1] == (
        "Acceptance rate: 1 cell lies outside the margin of 0.04: "
        "BF-BI bimodal 0.680 against 0.740."
    )
    assert said[2] == (
        "Fragmentation: 2 further cells lie outside the margin of 0.1 or 25% of the published "
        "value, whichever is more: RR uniform 3.220 against 5.354, RR bimodal 3.000 against 4.917."
    )


def test_many_cells_are_counted_not_listed(make_rows: Any) -> None:
    changes = {
        ("utilization_percent", d, p): 40.0
        for d in ("skew-small", "skew-big")
        for p in ("MFI", "BF-BI", "WF-BI")
    }
    (said,) = unexplained(make_rows(changes).compared())
    assert said.startswith("Utilization: 6 cells lie outside the margin of 3 points: MFI skew-big ")
    assert said.endswith(", and 3 more.")


def test_little_input_gives_few_sentences() -> None:
    assert findings(compare([], [])) == []
    alone = {"distribution": "bimodal", "policy": "MFI", "demand": 0.85}
    only_mfi = compare([{**alone, "scheduled_ratio_to_mfi": 1.0, "acceptance_rate": 1.0}], [])
    (said,) = findings(only_mfi)  # no rivals to lead, no ratio to judge
    assert said.startswith("Acceptance rate: 1 of 1 cell within 0.04")


def test_the_readings_name_the_lifetime_rule_that_ran() -> None:
    capacity, saturation = readings("capacity"), readings("saturation")
    assert "as many slots as the cluster has memory slices" in capacity[1]
    assert "the number of slots until demand reaches 100%" in saturation[1]
    assert readings("constant")[1] == "Lifetimes follow the rule 'constant'."
    for said in ("partial", "8 memory slices", "strict", "0.85"):
        assert any(said in reading for reading in capacity)
