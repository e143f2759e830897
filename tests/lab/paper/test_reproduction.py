"""The reproduction at full size: 500 runs of all 20 combinations, against what was published."""

from __future__ import annotations

import pytest

from slicewise import load_geometry, policy
from slicewise.cli.reproduce import GPUS, SCHEMES
from slicewise.lab.experiment import Published
from slicewise.lab.mix import PUBLISHED, parse_mix
from slicewise.lab.paper.comparison import Comparison, compare
from slicewise.lab.results import mean_fragmentation, published_rows
from slicewise.lab.runner import run_experiment


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    geometry = load_geometry("A100-80GB")
    mixes = tuple(parse_mix(name, geometry) for name in PUBLISHED)
    experiment = Published(mixes, tuple(map(policy, SCHEMES)), GPUS, runs=500, seed=1)
    outcome = run_experiment(experiment, None, lambda units: None)
    return compare(published_rows(outcome, labels=SCHEMES), mean_fragmentation(outcome, SCHEMES))


def test_acceptance(comparison: Comparison) -> None:
    off = [abs(cell.difference) for cell in comparison.of("acceptance_rate")]
    assert len(off) == 15
    assert max(off) <= 0.08
    assert sum(difference <= 0.04 for difference in off) >= 10


@pytest.mark.parametrize(
    ("figure", "margin"),
    [
        ("utilization_percent", 3),
        ("active_gpus_percent", 6),
        ("scheduled_ratio_to_mfi", 0.09),
    ],
)
def test_other_figures(comparison: Comparison, figure: str, margin: float) -> None:
    cells = comparison.of(figure)
    assert len(cells) == 15
    assert max(abs(cell.difference) for cell in cells) <= margin


def test_mfi_accepts_nearly_everything(comparison: Comparison) -> None:
    mfi = [cell for cell in comparison.of("acceptance_rate") if cell.policy == "MFI"]
    assert len(mfi) == 3
    assert all(cell.ours >= 0.995 for cell in mfi)


def test_fragmentation_ranks_as_published_between_packing_and_spreading(
    comparison: Comparison,
) -> None:
    """MFI stays among the packing policies, far below WF-BI and RR; RR is by far the worst."""
    for distribution in PUBLISHED:
        ours = {
            cell.policy: cell.ours
            for cell in comparison.of("fragmentation")
            if cell.distribution == distribution
        }
        packing = min(ours["FF"], ours["BF-BI"])
        assert ours["MFI"] - packing < 0.05
        assert ours["MFI"] < ours["WF-BI"] / 20
        assert ours["WF-BI"] < ours["RR"]
