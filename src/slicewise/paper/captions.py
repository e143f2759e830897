"""What is said about each figure of the report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caption:
    """The heading of a figure, the text below it, and what is read out in place of it."""

    title: str
    text: str
    alt: str


_KNOWN = {
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
        "is logarithmic where small values would not be seen otherwise.",
        "Bars of the average fragmentation by distribution and policy, with the published values "
        "as diamonds. The tables of this page hold the same numbers.",
    ),
    "steady": Caption(
        "Sustained load",
        "Beyond the paper: the share of requests rejected when arrivals go on for many "
        "lifetimes, with 95% intervals; less is better.",
        "Bars of the share of requests rejected under sustained load, by distribution and policy.",
    ),
}

_DEMAND = "demand-"


def caption(name: str) -> Caption:
    """The caption of a figure by its name; one nobody described is called by its name."""
    if name in _KNOWN:
        return _KNOWN[name]
    if name.startswith(_DEMAND):
        distribution = name.removeprefix(_DEMAND)
        return Caption(
            f"As demand grows: {distribution}",
            "Each line is a policy, its band the 95% interval. Demand is what was requested so "
            "far, as a share of the cluster's memory slices, whether or not it was placed.",
            f"Lines by policy for the distribution {distribution} as demand grows from 0 to 100%: "
            "scheduled workloads relative to MFI, acceptance rate, utilization, active GPUs.",
        )
    return Caption(name, "", name)
