"""Rows that agree with the paper exactly, for tests to change where they want a difference."""

from typing import Any

import pytest

from slicewise.lab.paper.comparison import Comparison, compare
from slicewise.lab.paper.published import published

Change = dict[tuple[str, str, str], float]
"""Values that differ from the paper: by figure, distribution and policy."""


class Rows:
    """Results and fragmentation rows as an experiment gives them."""

    def __init__(self, changes: Change | None = None, half_width: float = 0.01) -> None:
        paper = published()
        self.results: list[dict[str, Any]] = []
        self.fragmentation: list[dict[str, Any]] = []
        for distribution in ("uniform", "skew-small", "skew-big", "bimodal"):
            for policy in paper.policies:
                where = {"distribution": distribution, "policy": policy}
                at_85: dict[str, Any] = {**where, "demand": 0.85}
                averaged: dict[str, Any] = dict(where)
                for name, values in paper.figures.items():
                    row = averaged if name == "fragmentation" else at_85
                    value = values.get(distribution, {}).get(policy, 0.5)
                    value = (changes or {}).get((name, distribution, policy), value)
                    row[name] = value
                    row[f"{name}_ci95"] = [value - half_width, value + half_width]
                elsewhere = dict.fromkeys(paper.figures, 0.123)
                self.results += [at_85, {**where, "demand": 0.8, **elsewhere}]
                self.fragmentation.append(averaged)

    def compared(self) -> Comparison:
        return compare(self.results, self.fragmentation)


@pytest.fixture(scope="session")
def make_rows() -> type[Rows]:
    return Rows
