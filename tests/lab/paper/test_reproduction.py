"""The reproduction at full size: 500 runs under both readings, against what was published."""

from __future__ import annotations

import pytest

from slicewise import load_geometry
from slicewise.lab.executors import local_executor
from slicewise.lab.mix import PUBLISHED
from slicewise.lab.paper.comparison import Comparison, compare
from slicewise.lab.paper.readings import DIFFERENCES, READINGS, ReadingName, common_points
from slicewise.lab.results import mean_fragmentation, published_rows
from slicewise.lab.runner import Outcome, run_missing

DATA, TEXT = ReadingName


@pytest.fixture(scope="module")
def comparisons() -> dict[ReadingName, Comparison]:
    geometry = load_geometry("A100-80GB")
    outcomes = [Outcome(each.experiment(geometry, 500, 1)) for each in READINGS.values()]
    run_missing(outcomes, local_executor(None), lambda units: None)
    return {
        reading.name: compare(
            published_rows(outcome, reading.mfi, reading.schemes),
            mean_fragmentation(outcome, reading.schemes),
        )
        for reading, outcome in zip(READINGS.values(), outcomes, strict=True)
    }


def test_the_data_reading_gives_the_published_numbers(
    comparisons: dict[ReadingName, Comparison],
) -> None:
    data = comparisons[DATA]
    assert len(data.cells) == 80
    assert data.agreeing >= 76


def test_the_text_reading_gives_far_fewer(comparisons: dict[ReadingName, Comparison]) -> None:
    text = comparisons[TEXT]
    assert len(text.cells) == 80
    assert text.agreeing <= 50
    assert sum(cell.within for cell in text.of("fragmentation")) <= 5


@pytest.mark.parametrize(
    ("figure", "most"),
    [
        ("acceptance_rate", 0.03),
        ("scheduled_ratio_to_mfi", 0.02),
        ("utilization_percent", 1.5),
        ("active_gpus_percent", 2.0),
    ],
)
def test_no_figure_of_the_data_reading_is_far_off(
    comparisons: dict[ReadingName, Comparison], figure: str, most: float
) -> None:
    cells = comparisons[DATA].of(figure)
    assert len(cells) == 15
    assert max(abs(cell.difference) for cell in cells) <= most


def test_fragmentation_of_the_data_reading_is_within_a_fifth(
    comparisons: dict[ReadingName, Comparison],
) -> None:
    cells = comparisons[DATA].of("fragmentation")
    assert len(cells) == 20
    assert all(abs(cell.difference) <= 0.2 * cell.published for cell in cells)


@pytest.mark.parametrize("reading", ReadingName)
def test_mfi_accepts_nearly_everything(
    comparisons: dict[ReadingName, Comparison], reading: ReadingName
) -> None:
    cells = comparisons[reading].of("acceptance_rate")
    mfi = [cell for cell in cells if cell.policy == "MFI"]
    assert len(mfi) == 3
    assert all(cell.ours >= 0.995 for cell in mfi)


@pytest.mark.parametrize("reading", ReadingName)
def test_round_robin_is_the_most_fragmented(
    comparisons: dict[ReadingName, Comparison], reading: ReadingName
) -> None:
    for distribution in PUBLISHED:
        ours = {
            cell.policy: cell.ours
            for cell in comparisons[reading].of("fragmentation")
            if cell.distribution == distribution
        }
        assert ours["MFI"] < ours["WF-BI"] < ours["RR"]


def test_a_reading_says_what_it_runs() -> None:
    assert (READINGS[DATA].gpus, READINGS[TEXT].gpus) == (40, 100)
    assert READINGS[DATA].schemes["mfi-either"] == READINGS[TEXT].schemes["mfi"] == "MFI"
    assert all(point.data != point.text for point in DIFFERENCES)


def test_the_points_name_the_lifetime_rule_that_ran() -> None:
    capacity, saturation = common_points("capacity"), common_points("saturation")
    assert "as many slots as the cluster has memory slices" in capacity[0]
    assert "the number of slots until demand reaches 100%" in saturation[0]
    assert common_points("constant")[0] == "Lifetimes follow the rule 'constant'."
    for said in ("8 memory slices", "strict", "0.85"):
        assert any(said in point for point in capacity)
