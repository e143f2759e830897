"""Plans for recorded requests: a size counts only if every larger one meets the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest

from slicewise import Catalog, policy
from slicewise.core.cluster import Cluster
from slicewise.core.request import Request
from slicewise.lab.experiment import ORACLE, Tick
from slicewise.lab.planning import Count
from slicewise.lab.results import Row
from slicewise.lab.timeline import Timeline, lay_out
from slicewise.lab.trace import Job
from slicewise.lab.trace_planning import (
    TraceQuestion,
    plan_trace,
    trace_curve_rows,
    trace_plan_rows,
)
from slicewise.lab.trace_replay import EngineHost, figures, replay
from slicewise.policies.base import ScanPolicy, Spot

A100 = Catalog.builtin().find("A100-80GB").require()


@contextmanager
def unwatched(clusters: int, units: int) -> Iterator[Tick]:
    yield lambda done: None


class Never(ScanPolicy):
    """Rejects every request."""

    name: ClassVar[str] = "never"
    summary: ClassVar[str] = "Rejects all."

    def choose(self, cluster: Cluster, request: Request) -> Spot | None:
        return None


def recorded(seed: int, requests: int = 250, count: int = 1) -> Timeline:
    """A made-up trace: bursts of requests, one after the other on a few profiles."""
    rng = np.random.default_rng(seed)
    names = ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")
    jobs = []
    at = 0
    for line in range(requests):
        at += int(rng.integers(0, 40))
        profile = A100.profile(names[int(rng.integers(len(names)))])
        number = count if rng.random() < 0.1 else 1
        lifetime = Fraction(int(rng.integers(1, 900)))
        jobs.append(
            Job(
                line,
                Fraction(at),
                lifetime,
                Request(profile.name),
                number,
                number * profile.size,
                profile.name,
                "",
            )
        )
    return lay_out(jobs, Fraction(500))


def traced(timeline: Timeline, *names: str, target: float = 0.05, **changes: object) -> Row:
    fields: dict[str, object] = {"target": target, **changes}
    asked = TraceQuestion(timeline, A100, tuple(map(policy, names)), **fields)  # type: ignore[arg-type]
    found, missing = plan_trace(asked, unwatched)
    return {
        "asked": asked,
        "found": found,
        "rows": trace_plan_rows(asked, found, missing),
        "curve": trace_curve_rows(asked, found),
        "missing": missing,
    }


@pytest.mark.parametrize("count", Count)
def test_a_trace_needs_what_all_larger_clusters_meet(count: Count) -> None:
    timeline = recorded(2, 150, count=3)
    assert timeline.preplaced > 0
    result = traced(timeline, "least-lost", "first-fit", count=count)
    name = "rejected_share" if count is Count.REQUESTS else "rejected_slices_share"
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [row["policy"] for row in rows] == ["least-lost", "first-fit", ORACLE]
    for row, chosen in zip(rows, ("least-lost", "first-fit"), strict=False):
        needed, first = row["needed_gpus"], row["first_gpus"]
        assert isinstance(needed, int)
        assert isinstance(first, int)
        assert first <= needed
        meets = {}
        for gpus in range(first - 3, needed + 6):
            host = EngineHost(A100, gpus, policy(chosen))
            found = figures(replay(timeline, host), host.totals)
            share = found[name]
            assert isinstance(share, float)
            meets[gpus] = share <= 0.05 and not found["preplaced_rejected"]
            if gpus == needed:
                assert row["rejected"] == found["rejected"]
                assert row[name] == share
        assert not meets[needed - 1]
        assert all(meets[gpus] for gpus in range(needed, needed + 6))
        assert meets[first]
        assert not any(meets[gpus] for gpus in range(first - 3, first))
        assert row["load"] == pytest.approx(timeline.offered_slices / 8 / needed)


def test_a_larger_cluster_may_reject_more() -> None:
    """Some seed shows it: sizes that meet the target below one that does not."""
    spans = []
    for seed in range(8):
        rows = traced(recorded(seed, 100, count=4), "first-fit", target=0.03, oracle=False)["rows"]
        assert isinstance(rows, list)
        spans.append(rows[0]["needed_gpus"] - rows[0]["first_gpus"])
    assert max(spans) > 0
    assert min(spans) == 0


def test_jobs_placed_beforehand_must_fit() -> None:
    names = ["7g.80gb"] * 5 + ["1g.10gb"] * 40
    jobs = [
        Job(n, Fraction(n), Fraction(10_000), Request(name), 1, A100.profile(name).size, name, "")
        for n, name in enumerate(names)
    ]
    timeline = lay_out(jobs, Fraction(5))
    assert timeline.preplaced == 5
    result = traced(timeline, "first-fit", target=0.5, oracle=False)
    rows = result["rows"]
    assert isinstance(rows, list)
    (row,) = rows
    # Three GPUs would suffice for half of the arrivals, if only two jobs had run before.
    assert row["needed_gpus"] == 8
    curve = result["curve"]
    assert isinstance(curve, list)
    assert any(each["preplaced_rejected"] for each in curve if each["gpus"] < 5)


def test_trace_rows_compare_with_the_reference_and_the_limit() -> None:
    result = traced(recorded(1), "worst-fit", "first-fit", step=2)
    rows = result["rows"]
    assert isinstance(rows, list)
    worst, first, limit = rows
    assert worst["saved_gpus"] == first["needed_gpus"] - worst["needed_gpus"]
    assert worst["above_limit_gpus"] == worst["needed_gpus"] - limit["needed_gpus"]
    assert worst["saved_percent"] == 100 * worst["saved_gpus"] / first["needed_gpus"]
    assert all(row["needed_gpus"] % 2 == 0 for row in rows)
    assert result["missing"] is None
    off = traced(recorded(1), "first-fit", oracle=False)
    assert off["missing"] == "it was not requested"


def test_a_policy_that_never_meets_a_trace() -> None:
    timeline = recorded(2, 60)
    asked = TraceQuestion(timeline, A100, (Never(), policy("first-fit")), 0.05, oracle=False)
    found, missing = plan_trace(asked, unwatched)
    lost, reference = trace_plan_rows(asked, found, missing)
    assert lost["needed_gpus"] is None
    assert lost["rejected"] is None
    assert lost["saved_gpus"] is None
    assert lost["tried_to_gpus"] == timeline.peak_instances
    assert reference["saved_gpus"] == 0
