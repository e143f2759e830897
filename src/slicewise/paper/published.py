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
"""The policy that the numbers of scheduled workloads are divided by."""

RATIO = "scheduled_ratio_to_mfi"
"""The figure that the paper does not print: it follows from its scheduled workloads."""


@dataclass(frozen=True)
class Published:
    """What the paper reports, and the setting it reports it for."""

    title: str
    authors: tuple[str, ...]
    year: int
    model: str
    gpus: int
    runs: int
    demand: float
    """The demand, as a share of the cluster's capacity, at which its bar charts are drawn."""
    policies: tuple[str, ...]
    figures: Mapping[str, Values]
    """By the column of the results that it is compared with."""
    sources: Mapping[str, str]
    """Where in the paper each figure is."""

    @property
    def citation(self) -> str:
        """The paper in one line."""
        return f"{', '.join(self.authors)}: {self.title} ({self.year})"


@cache
def published() -> Published:
    """The published figures, read from the file that comes with the package."""
    text = files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    data = json.loads(text)
    paper: dict[str, Any] = data["paper"]
    figures: dict[str, Values] = {k: v["values"] for k, v in data["figures"].items()}
    sources: dict[str, str] = {k: v["source"] for k, v in data["figures"].items()}
    figures[RATIO] = _ratios(figures.pop("scheduled_workloads_percent"))
    sources[RATIO] = sources.pop("scheduled_workloads_percent")
    return Published(
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
