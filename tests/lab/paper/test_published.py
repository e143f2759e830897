"""The published figures that come with the package."""

import pytest

from slicewise.lab.paper.published import published


def test_some_numbers_of_the_paper() -> None:
    figures = published().figures
    assert figures["acceptance_rate"]["bimodal"]["BF-BI"] == 0.74
    assert figures["utilization_percent"]["skew-big"]["RR"] == 59.11872
    assert figures["active_gpus_percent"]["skew-small"]["WF-BI"] == 100
    assert figures["fragmentation"]["uniform"]["MFI"] == 0.4142780618


def test_scheduled_workloads_are_divided_by_those_of_mfi() -> None:
    ratios = published().figures["scheduled_ratio_to_mfi"]
    assert ratios["bimodal"]["BF-BI"] == pytest.approx(78.78 / 97.0)
    assert {by_policy["MFI"] for by_policy in ratios.values()} == {1.0}


def test_every_figure_has_every_policy() -> None:
    paper = published()
    assert paper.policies == ("MFI", "BF-BI", "WF-BI", "FF", "RR")
    assert set(paper.figures) == set(paper.sources)
    for name, by_distribution in paper.figures.items():
        expected = {"skew-small", "skew-big", "bimodal"}
        assert set(by_distribution) == expected | (
            {"uniform"} if name == "fragmentation" else set()
        )
        for by_policy in by_distribution.values():
            assert tuple(by_policy) == paper.policies


def test_the_setting_and_the_citation() -> None:
    paper = published()
    assert (paper.model, paper.gpus, paper.runs, paper.demand) == ("A100-80GB", 100, 500, 0.85)
    assert paper.citation == (
        "Marco Zambianco, Lorenzo Fasol, Roberto Doriguzzi-Corin: An Online Fragmentation-Aware "
        "GPU Scheduler for Multi-Tenant MIG-based Clouds (2025)"
    )
