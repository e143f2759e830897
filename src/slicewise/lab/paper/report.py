"""The HTML report of a reproduction: our figures beside the published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slicewise.lab.html import render_page
from slicewise.lab.paper.comparison import Comparison
from slicewise.lab.paper.findings import readings, unexplained
from slicewise.lab.paper.published import published

_CLOSEST_LIFETIME = "capacity"
"""The lifetime rule that gives the paper's figures."""


@dataclass(frozen=True)
class RunMeta:
    """What was run, in enough detail to run it again."""

    runs: int
    seed: int
    gpus: int
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
        "The mean score F over all GPUs, averaged over the demand rows; less is better. The scale "
        "is logarithmic if small values would be invisible otherwise.",
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
    meta: RunMeta,
    comparison: Comparison,
    findings: Sequence[str],
    figures: Mapping[str, str],
) -> str:
    """Return the page: findings, side-by-side tables, figures and how to read them.

    ``figures`` are SVG elements by name (`figures.save.svg_text`), in the order of the page.
    """
    paper = published()
    open_points = unexplained(comparison)
    return render_page(
        "report.html",
        style="report.css",
        title="slicewise beside the paper",
        meta=meta,
        paper=paper,
        same_setting=(meta.model, meta.gpus) == (paper.model, paper.gpus),
        closest_lifetime=_CLOSEST_LIFETIME,
        comparison=comparison,
        findings=[finding for finding in findings if finding not in open_points],
        open_points=open_points,
        run_facts={
            "Runs": f"{meta.runs:,} (the paper: {paper.runs:,})",
            "Seed": meta.seed,
            "Cluster": f"{meta.gpus:,} {meta.model} GPUs",
            "Lifetimes": meta.lifetime,
            "Version": f"slicewise {meta.version}",
        },
        figures=[(caption(name), svg) for name, svg in figures.items()],
        readings=readings(meta.lifetime),
    )
