"""The digits of the published means give 40 GPUs away."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from slicewise.lab.paper.arithmetic import impossible, possible_gpus, possible_runs
from slicewise.lab.paper.published import PublishedFigures, published


def with_active(**shares: float) -> PublishedFigures:
    paper = published()
    return replace(paper, figures={**paper.figures, "active_gpus_percent": {"any": shares}})


def test_the_published_shares_are_multiples_of_one_in_forty_gpus_and_500_runs() -> None:
    step = Fraction(100, 40 * 500)
    shares = [
        Fraction(repr(share))
        for by_policy in published().figures["active_gpus_percent"].values()
        for share in by_policy.values()
    ]
    assert len(shares) == 15
    assert step == Fraction("0.005")
    assert all((share / step).denominator == 1 for share in shares)


def test_with_500_runs_only_multiples_of_40_gpus_are_possible() -> None:
    assert possible_gpus() == [40, 80, 120, 160, 200]


def test_100_gpus_are_not_possible() -> None:
    found = impossible(100)
    assert [each.percent for each in found] == [65.205, 85.975, 84.185, 94.235, 94.675]
    assert [each.policy for each in found] == ["BF-BI", "MFI", "BF-BI", "RR", "RR"]
    assert found[0].sum == Fraction("32602.5")
    assert impossible(40) == []


def test_the_digits_of_utilization_need_a_multiple_of_500_runs() -> None:
    assert possible_runs() == [500, 1000, 1500, 2000]


def test_a_share_worked_out_by_hand() -> None:
    """Half a percent of 500 runs: 2.5 GPUs of 1, 5 of 2."""
    assert possible_gpus(with_active(MFI=0.5))[:3] == [2, 4, 6]
    (odd,) = impossible(1, with_active(MFI=0.5))
    assert odd.sum == Fraction("2.5")
