"""The metrics of the table that places requests, and of the rehearsals that choose it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slicewise.policies.rehearsed import FORMS
from slicewise.runtime.rehearsals import Rehearsals
from slicewise.runtime.runtime import Runtime


class PolicyCollector(Collector):
    """Computes them for a scrape."""

    def __init__(self, runtime: Runtime, rehearsals: Rehearsals) -> None:
        self._runtime = runtime
        self._rehearsals = rehearsals

    def collect(self) -> Iterator[Metric]:
        """The table in use, its changes, rejections expected and seen, and rehearsals."""
        state, rehearsals = self._runtime.state, self._rehearsals
        policy, choice = state.policy, state.policy.standing.choice
        used = choice.form if policy.rehearses else None
        table = _gauge("policy_table", "The table that places requests", "table")
        for form in FORMS:
            table.add_metric((form,), int(form == used))
        yield table
        yield _counter("policy_switches", "Changes of the table", policy.switches)
        expected = _gauge(
            "rejections_expected",
            "Share of requests the last rehearsal expects to be rejected",
            "table",
        )
        for finding in () if policy.rehearsal is None else policy.rehearsal.findings:
            of = finding.choice
            name = f"{of.form}+leases" if of.leases else of.form
            expected.add_metric((name,), finding.requests.value)
        yield expected
        demand = state.demand
        yield _counter(
            "demand_requests", "Instances asked for since the table changed", demand.seen
        )
        yield _counter("demand_rejected", "Those of them that were rejected", demand.seen_rejected)
        runs = CounterMetricFamily(
            "slicewise_rehearsals", "Rehearsals of this process", labels=("result",)
        )
        runs.add_metric(("finished",), rehearsals.finished)
        runs.add_metric(("failed",), rehearsals.failed)
        yield runs
        yield _counter("rehearsal_seconds", "Time that rehearsals took", rehearsals.seconds)


def _gauge(name: str, text: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"slicewise_{name}", text, labels=(label,))


def _counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(f"slicewise_{name}", text)
    family.add_metric((), value)
    return family
