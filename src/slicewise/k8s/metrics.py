"""The controller's own metrics, beside those of the service that shows what it knows."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slicewise.k8s.controller import Controller


class ControllerMetrics(Collector):
    """Reads a controller's tally whenever somebody looks."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        """All families."""
        controller, tally = self._controller, self._controller.tally
        for name, text, value in (
            ("slicewise_k8s_leading", "Whether this replica gives out devices", controller.leads),
            ("slicewise_k8s_ready", "Whether it knows the cluster", not controller.problem),
            ("slicewise_k8s_pods_waiting", "Pods that wait for devices", controller.waiting),
            ("slicewise_k8s_watches_down", "Watches that fail", controller.watches_down),
        ):
            yield GaugeMetricFamily(name, text, value=float(value))
        for name, text, count in (
            ("slicewise_k8s_pods_decided", "Pods for which devices were chosen", tally.decided),
            ("slicewise_k8s_claims_allocated", "Claims given devices", tally.allocated),
            ("slicewise_k8s_decisions_failed", "Decisions that came too late", tally.failed),
            (
                "slicewise_k8s_allocations_returned",
                "Allocations that the scheduler could not use",
                tally.returned,
            ),
            (
                "slicewise_k8s_allocations_taken_back",
                "Allocations taken back from pods that went",
                tally.taken_back,
            ),
            (
                "slicewise_k8s_conflicts",
                "Allocations given up to claims of other classes",
                tally.conflicts,
            ),
            ("slicewise_k8s_elections", "How often it began to lead", tally.elections),
            ("slicewise_k8s_watch_failures", "How often a watch failed", tally.watches),
            ("slicewise_k8s_messages_lost", "Pods not told why they wait", tally.untold),
            ("slicewise_k8s_deciding_seconds", "Time spent choosing", tally.deciding_seconds),
        ):
            yield CounterMetricFamily(name, text, value=float(count))
