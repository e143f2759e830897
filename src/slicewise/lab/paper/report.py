"""The HTML report of a reproduction: both readings beside the published figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slicewise.lab.html import render_page
from slicewise.lab.paper.arithmetic import (
    MOST_GPUS,
    MOST_RUNS,
    impossible,
    possible_gpus,
    possible_runs,
)
from slicewise.lab.paper.comparison import Comparison, Quantity, SideBySide, side_by_side
from slicewise.lab.paper.findings import findings, outside
from slicewise.lab.paper.published import published
from slicewise.lab.paper.readings import DIFFERENCES, READINGS, ReadingName, common_points

_CLOSEST_LIFETIME = "capacity"
"""The lifetime rule that gives the paper's figures."""


@dataclass(frozen=True)
class RunMeta:
    """What was run, in enough detail to run it again."""

    reading: ReadingName
    """The reading that the figures show."""
    runs: int
    seed: int
    model: str
    lifetime: str
    """The rule for lifetimes: capacity or saturation."""
    version: str
    command: str
    """The command line that gives this report again."""
    interrupted: str = ""
    """A sentence that says what is missing; empty if everything was run."""


@dataclass(frozen=True)
class Caption:
    """The heading of a figure, the text below it, and the text for screen readers."""

    title: str
    text: str
    alt: str


_CAPTIONS = {
    "bars": Caption(
        "All distributions at 85% demand",
        "Bars are ours, with 95% intervals; diamonds are the published values, which the paper "
        "has for all but the uniform distribution. A diamond off the end of its bar is a "
        "difference.",
        "Four groups of bars by distribution and policy: scheduled workloads relative to MFI, "
        "acceptance rate, utilization and active GPUs, with the published values as diamonds. "
        "The tables of this page hold the same numbers.",
    ),
    "fragmentation": Caption(
        "Average fragmentation",
        "The mean score F of a run; less is better. The scale is logarithmic if small values "
        "would be invisible otherwise.",
        "Bars of the average fragmentation by distribution and policy, with the published values "
        "as diamonds. The tables of this page hold the same numbers.",
    ),
}

_DEMAND = "demand-"


def caption(name: str) -> Caption:
    """Return the caption of a figure: ``bars``, ``fragmentation`` or ``demand-DISTRIBUTION``."""
    if name in _CAPTIONS:
        return _CAPTIONS[name]
    distribution = name.removeprefix(_DEMAND)
    return Caption(
        f"As demand grows: {distribution}",
        "Each line is a policy, its band the 95% interval. Demand is what was requested so "
        "far, as a share of the cluster's memory slices, whether or not it was placed.",
        f"Lines by policy for the distribution {distribution} as demand grows from 0 to 100%: "
        "scheduled workloads relative to MFI, acceptance rate, utilization, active GPUs.",
    )


def render_report(
    meta: RunMeta, comparisons: Mapping[str, Comparison], figures: Mapping[str, str]
) -> str:
    """Return the page: counts, the arithmetic, side-by-side tables, figures, how to read them.

    ``comparisons`` are by the name of the reading. ``figures`` are SVG elements by name
    (`figures.save.svg_text`), in the order of the page.
    """
    paper = published()
    return render_page(
        "report.html",
        style="report.css",
        title="slicewise beside the paper",
        meta=meta,
        paper=paper,
        closest_lifetime=_CLOSEST_LIFETIME,
        readings={name: READINGS[ReadingName(name)] for name in comparisons},
        comparisons=comparisons,
        findings={name: findings(each) for name, each in comparisons.items()},
        outside={name: outside(each) for name, each in comparisons.items()},
        tables=_tables(side_by_side(comparisons)),
        impossible=impossible(paper.gpus),
        possible_gpus=possible_gpus(),
        most_gpus=MOST_GPUS,
        possible_runs=possible_runs(),
        most_runs=MOST_RUNS,
        differences=DIFFERENCES,
        run_facts={
            "Runs": f"{meta.runs:,} (the paper: {paper.runs:,})",
            "Seed": meta.seed,
            "GPU model": meta.model,
            "Lifetimes": meta.lifetime,
            "Version": f"slicewise {meta.version}",
        },
        figures=[(caption(name), svg) for name, svg in figures.items()],
        common_points=common_points(meta.lifetime),
    )


def _tables(lines: Iterable[SideBySide]) -> dict[Quantity, dict[str, list[SideBySide]]]:
    """Return the lines by quantity and distribution, in their order."""
    tables: dict[Quantity, dict[str, list[SideBySide]]] = {}
    for line in lines:
        groups = tables.setdefault(line.quantity, {})
        groups.setdefault(line.distribution, []).append(line)
    return tables
