"""The figures the paper published, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

Values = Mapping[str, Mapping[str, float]]
"""A published figure: its value by distribution and policy."""

REFERENCE = "MFI"
"""The policy that scheduled workloads are relative to."""

RATIO = "scheduled_ratio_to_mfi"
"""A figure that is computed from the paper's scheduled workloads."""


@dataclass(frozen=True)
class PublishedFigures:
    """The published figures and their setting."""

    title: str
    authors: tuple[str, ...]
    year: int
    model: str
    gpus: int
    runs: int
    demand: float
    """The demand of the bar charts, as a share of the cluster's capacity."""
    policies: tuple[str, ...]
    figures: Mapping[str, Values]
    """By column of the results."""
    sources: Mapping[str, str]
    """The place of each figure in the paper."""

    @property
    def citation(self) -> str:
        """The paper in one line."""
        return f"{', '.join(self.authors)}: {self.title} ({self.year})"


@cache
def published() -> PublishedFigures:
    """Return the published figures from the package's data file."""
    text = files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    data = json.loads(text)
    paper: dict[str, Any] = data["paper"]
    figures: dict[str, Values] = {k: v["values"] for k, v in data["figures"].items()}
    sources: dict[str, str] = {k: v["source"] for k, v in data["figures"].items()}
    figures[RATIO] = _ratios(figures.pop("scheduled_workloads_percent"))
    sources[RATIO] = sources.pop("scheduled_workloads_percent")
    return PublishedFigures(
        title=paper["title"],
        authors=tuple(paper["authors"]),
        year=paper["year"],
        model=paper["model"],
        gpus=paper["gpus"],
        runs=paper["runs"],
        demand=paper["demand"],
        policies=tuple(data["policies"]),
        figures=figures,
        sources=sources,
    )


def _ratios(scheduled: Values) -> Values:
    return {
        distribution: {policy: value / by_policy[REFERENCE] for policy, value in by_policy.items()}
        for distribution, by_policy in scheduled.items()
    }
