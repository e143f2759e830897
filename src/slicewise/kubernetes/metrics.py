"""The Prometheus metrics of the controller, beside those of the service that serves them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slicewise.kubernetes.controller import Controller


class ControllerMetrics(Collector):
    """Exports the stats of a controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        controller, stats = self._controller, self._controller.stats
        for name, text, value in (
            ("slicewise_k8s_leading", "Whether this replica is the leader", controller.leads),
            (
                "slicewise_k8s_ready",
                "Whether everything is listed and watched, and a leader can allocate",
                not controller.problem,
            ),
            (
                "slicewise_k8s_allocating",
                "Whether this replica is the leader and can allocate",
                controller.deciding and not controller.problem,
            ),
            ("slicewise_k8s_pods_waiting", "Pods that wait for devices", controller.waiting),
            (
                "slicewise_k8s_lines",
                "Lines of waiting pods: those of a namespace that ask for the same",
                stats.lines,
            ),
            (
                "slicewise_k8s_reservations",
                "Windows reserved for waiting pods",
                stats.reservations,
            ),
            (
                "slicewise_k8s_claims_quarantined",
                "Claims that are not allocated, because the API refuses to change them",
                stats.quarantined,
            ),
            (
                "slicewise_k8s_claims_cooling",
                "Claims with freed slices that cool down, because their pod vanished",
                stats.cooling,
            ),
            (
                "slicewise_k8s_prepares_failing",
                "Bound pods whose devices the driver cannot prepare",
                stats.prepares_failing,
            ),
            (
                "slicewise_k8s_namespaces_unreadable",
                "Namespaces with an annotation that cannot be read",
                stats.unreadable,
            ),
            ("slicewise_k8s_watches_down", "Watches that fail", controller.watches_down),
        ):
            yield GaugeMetricFamily(name, text, value=float(value))
        for name, text, count in (
            ("slicewise_k8s_pods_decided", "Pods for which devices were chosen", stats.decided),
            ("slicewise_k8s_claims_allocated", "Claims given devices", stats.allocated),
            ("slicewise_k8s_decisions_failed", "Decisions that could not be written", stats.failed),
            (
                "slicewise_k8s_allocations_returned",
                "Allocations that kube-scheduler could not use",
                stats.returned,
            ),
            (
                "slicewise_k8s_allocations_taken_back",
                "Allocations revoked after their pod was deleted",
                stats.revoked,
            ),
            (
                "slicewise_k8s_pods_evicted",
                "Pods evicted for others of a higher priority",
                stats.evicted,
            ),
            (
                "slicewise_k8s_conflicts",
                "Allocations given up to claims of other classes",
                stats.conflicts,
            ),
            (
                "slicewise_k8s_prepare_failures",
                "Bound pods whose devices the driver could not prepare",
                stats.prepare_failures,
            ),
            ("slicewise_k8s_elections", "Terms as the leader", stats.elections),
            ("slicewise_k8s_watch_failures", "Failures of watches", stats.watches),
            (
                "slicewise_k8s_messages_lost",
                "Messages to pods that were not written",
                stats.messages_lost,
            ),
            (
                "slicewise_k8s_deciding_seconds",
                "Time spent choosing devices",
                stats.deciding_seconds,
            ),
        ):
            yield CounterMetricFamily(name, text, value=float(count))
