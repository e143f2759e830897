"""Metrics for Prometheus.

Events are counted as they happen. The state of the cluster is computed for each scrape, from GPU
states, so its cost hardly grows with the number of GPUs.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slicewise.control.actors import Failure
from slicewise.control.agents import UNKNOWN
from slicewise.core.fragmentation import Reading
from slicewise.journal.agent_entries import PartTurned, Phase
from slicewise.journal.entries import Allocated, Ended, Queued, Rejected, Row, Served
from slicewise.journal.reclaim_entries import Reclaiming
from slicewise.runtime.agent_liveness import AgentLiveness
from slicewise.runtime.commit_loop import Batch
from slicewise.runtime.rehearsals import Rehearsals
from slicewise.runtime.runtime import Runtime
from slicewise.server.capacity import FreeCapacity
from slicewise.server.limits import Streams
from slicewise.server.policy_metrics import PolicyCollector
from slicewise.server.sign_in import SignIn
from slicewise.server.sign_in_metrics import SignInCollector

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WAITS = (0.1, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_CREATIONS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_NEED = "need"
"""Value of the profile label for requests that state a need instead of a profile."""

# Prometheus does not use the second series of every counter and histogram.
disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no annotations


class Metrics:
    """The counters and histograms of a process, and a collector for everything else."""

    def __init__(
        self,
        runtime: Runtime,
        streams: Streams,
        liveness: AgentLiveness,
        capacity: Callable[[], FreeCapacity],
        rehearsals: Rehearsals,
        sign_in: SignIn,
    ) -> None:
        self._runtime = runtime
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"slicewise_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"slicewise_{name}", text, labels, buckets=buckets, registry=registry)

        self._placed = counter(
            "instances_placed", "Instances placed by this process", "model", "profile"
        )
        self._rejected = counter(
            "requests_rejected", "Allocation requests rejected by this process", "reason", "profile"
        )
        self._queued = counter("requests_queued", "Allocation requests that had to wait")
        self._ended = counter("allocations_ended", "Allocations that ended", "cause")
        self._reclaims = counter("reclaim_notices", "Allocations that got notice of a reclaim")
        self._waits = histogram("queue_wait_seconds", "Time from request to placement", _WAITS)
        self._creations = histogram("create_seconds", "Time from placed to active", _CREATIONS)
        self._decide = histogram("decide_seconds", "Time to decide a batch", _SECONDS)
        self._commit = histogram("commit_seconds", "Time to make a batch durable", _SECONDS)
        self._batch = histogram("batch_size", "Requests that shared a commit", _SIZES)
        self._requests = counter("http_requests", "Requests answered", "route", "method", "status")
        self._seconds = histogram("http_seconds", "Time to answer a request", _SECONDS, "route")
        # `labels` takes microseconds, and every request needs several of these.
        self._requests_of = lru_cache(1024)(self._requests.labels)
        self._seconds_of = lru_cache(1024)(self._seconds.labels)
        self._placed_of = lru_cache(1024)(self._placed.labels)
        self._ended_of = lru_cache(64)(self._ended.labels)
        self._malformed = counter("malformed_requests", "Requests that could not be parsed")
        self._limited = counter(
            "rate_limited", "Requests refused or delayed by a rate limit", "limit"
        )
        self._auth_failures = counter(
            "authentication_failures", "Requests without a valid token", "reason"
        )
        for reason in get_args(Failure):
            self._auth_failures.labels(reason)
        registry.register(_StateCollector(runtime, streams, liveness, capacity))
        registry.register(PolicyCollector(runtime, rehearsals))
        registry.register(SignInCollector(sign_in))
        ProcessCollector(registry=registry)
        for collector in runtime.source.collectors if runtime.source is not None else ():
            registry.register(collector)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def count_request(self, route: str, method: str, status: int, seconds: float | None) -> None:
        """Count an answered request; its duration is None for streams and long polls."""
        self._requests_of(route, method, status).inc()
        if seconds is not None:
            self._seconds_of(route).observe(seconds)

    def count_limited(self, limit: str) -> None:
        """Count a request that a rate limit refused or delayed."""
        self._limited.labels(limit).inc()

    def count_auth_failure(self, reason: Failure) -> None:
        """Count a request without a valid token."""
        self._auth_failures.labels(reason).inc()

    def count_malformed(self) -> None:
        """Count a request that could not be parsed."""
        self._malformed.inc()

    def count_batch(self, batch: Batch) -> None:
        """Count a batch that this process decided and committed."""
        if batch.commit_seconds:
            self._decide.observe(batch.decide_seconds)
            self._commit.observe(batch.commit_seconds)
            self._batch.observe(len(batch.outcomes))
        for row in batch.rows:
            self._count_row(row)

    def count_followed(self, rows: Iterable[Row]) -> None:
        """Count rows of another system, if this process makes that system's decisions."""
        source = self._runtime.source
        if source is not None and source.leads():
            for row in rows:
                self._count_row(row)

    def _count_row(self, row: Row) -> None:
        match row.entry:
            case Allocated(record):
                for part in record.parts:
                    self._placed_of(part.model, part.profile).inc()
                self._waits.observe(0)
            case Ended(record):
                self._ended_of(str(record.cause)).inc()
            case Served(identity, _, parts):
                for part in parts:
                    self._placed_of(part.model, part.profile).inc()
                waiter = self._runtime.state.allocations.get(identity)
                if waiter is not None:  # it may have ended in the same batch
                    self._waits.observe(max(0.0, row.at - waiter.requested))
            case Rejected(want=want, reason=reason):
                self._rejected.labels(reason, want.profile or _NEED).inc()
            case Reclaiming(at=float() | int()):
                self._reclaims.inc()
            case Queued():
                self._queued.inc()
            case PartTurned(identity, phase=Phase.ACTIVE):
                placed = self._runtime.state.allocations.get(identity)
                if placed is not None and placed.placed is not None:
                    self._creations.observe(max(0.0, row.at - placed.placed))


class _StateCollector(Collector):
    """Computes the metrics of the cluster, its agents and this process for a scrape."""

    def __init__(
        self,
        runtime: Runtime,
        streams: Streams,
        liveness: AgentLiveness,
        capacity: Callable[[], FreeCapacity],
    ) -> None:
        self._runtime = runtime
        self._streams = streams
        self._liveness = liveness
        self._capacity = capacity

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield from self._cluster()
        yield from self._agents()
        yield from self._process()

    def _cluster(self) -> Iterator[Metric]:
        state, models = self._runtime.state, self._capacity().models()
        cluster = state.cluster
        yield _gauge("gpus", "GPUs", ("model",), [((m.model,), m.gpus) for m in models])
        yield _gauge(
            "gpus_schedulable",
            "GPUs that accept new instances",
            ("model",),
            [((m.model,), m.schedulable_gpus) for m in models],
        )
        yield _gauge(
            "slices", "Memory slices", ("model",), [((m.model,), m.slices) for m in models]
        )
        yield _gauge(
            "slices_free",
            "Free memory slices",
            ("model",),
            [((m.model,), m.free_slices) for m in models],
        )
        yield _gauge(
            "utilization",
            "Share of memory slices in use",
            ("model",),
            [((m.model,), 1 - m.free_slices / m.slices) for m in models],
        )
        yield _gauge(
            "fragmentation",
            "Mean F of a GPU",
            ("reading",),
            [((str(reading),), cluster.fragmentation(reading)) for reading in Reading],
        )
        yield _gauge(
            "placements_left",
            "Windows open to a profile",
            ("model", "profile"),
            [((m.model, p), count) for m in models for p, count in m.placements.items()],
        )
        yield _gauge(
            "gpus_with_room",
            "GPUs that could take a profile",
            ("model", "profile"),
            [((m.model, p), count) for m in models for p, count in m.fits.items()],
        )
        yield _value("gpus_active", "GPUs with an instance", cluster.active_gpus)
        yield _value("instances", "Instances", sum(n.instances for n in state.nodes.values()))
        yield _value("nodes", "Nodes", len(state.nodes))
        yield _value("tenants", "Tenants", len(state.tenants))
        yield from self._queue()

    def _queue(self) -> Iterator[Metric]:
        queue, reservations = self._runtime.state.waiting, self._runtime.state.reservations
        oldest = queue.oldest
        waits = 0.0 if oldest is None else max(0.0, self._runtime.clock() - oldest.entered)
        yield _value("queue_depth", "Allocation requests in the queue", len(queue))
        lines = sum(1 for _ in queue.each_line())
        yield _value("queue_lines", "Lines of requests of a tenant for the same instances", lines)
        yield _value("queue_oldest_seconds", "Wait of the oldest request in the queue", waits)
        yield _value("reserved_windows", "Windows reserved for queued requests", len(reservations))

    def _agents(self) -> Iterator[Metric]:
        state, liveness = self._runtime.state, self._liveness
        agents = Counts({"reachable": 0, "unknown": 0})
        held: Counts[str] = Counts()
        foreign = 0
        for node in state.nodes.values():
            if node.agent is not None:
                agents["unknown" if UNKNOWN in node.holds else "reachable"] += 1
                foreign += len(node.agent.foreign)
                held.update(why for holds in node.agent.gpu_holds.values() for why in holds)
        phases = {str(phase): state.phases[phase] for phase in Phase if phase is not Phase.GONE}
        for name, text, label, counts in (
            ("agents", "Agents by reachability", "state", agents),
            ("managed_instances", "Instances on nodes with an agent", "phase", phases),
            ("gpus_held", "GPUs that accept no new instances", "reason", held),
        ):
            yield _gauge(name, text, (label,), [((of,), count) for of, count in counts.items()])
        yield _value("foreign_instances", "Instances without an allocation", foreign)
        yield _value("agent_polls", "Agents in a long poll of this process", liveness.waiting)
        yield _gauge(
            "gpu_temperature_celsius",
            "Temperature of a GPU in the last report of its agent",
            ("node", "gpu"),
            [((node, gpu), degrees) for node, gpu, degrees in liveness.temperatures()],
        )

    def _process(self) -> Iterator[Metric]:
        runtime = self._runtime
        commit_loop = runtime.commit_loop
        trouble = runtime.store_trouble is not None or (
            commit_loop is not None and bool(commit_loop.trouble)
        )
        leads = runtime.leads if runtime.source is None else runtime.source.leads()
        yield _value("is_leader", "Whether this process leads", int(leads))
        yield _value("database_trouble", "Whether the database fails", int(trouble))
        yield _value("journal_seq", "The last journal entry in this process", runtime.replica.seq)
        yield _value(
            "snapshots_damaged", "Damaged snapshots of the state", len(runtime.store.warnings)
        )
        yield _value(
            "writer_waiting",
            "Commands that wait for the commit loop",
            commit_loop.waiting if commit_loop else 0,
        )
        yield _value("event_streams", "Open event streams", self._streams.open)
        yield _value(
            "clock_step_seconds",
            "Step of the wall clock that service time does not follow",
            runtime.steady.step,
        )
        steps = CounterMetricFamily(
            "slicewise_clock_steps", "Steps of the wall clock that service time did not follow"
        )
        steps.add_metric((), runtime.steady.steps)
        yield steps


def _value(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"slicewise_{name}", text, value=value)


def _gauge(
    name: str,
    text: str,
    labels: tuple[str, ...],
    values: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    family = GaugeMetricFamily(f"slicewise_{name}", text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family
