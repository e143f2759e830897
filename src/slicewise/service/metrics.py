"""Metrics for Prometheus: counted as things happen, measured when somebody looks.

Counting is an addition in a table, since it happens on every request. What the cluster looks like
is worked out at a scrape, from states, so that it takes as long at ten GPUs as at ten thousand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from slicewise.control.actors import Failure
from slicewise.control.agents import UNKNOWN
from slicewise.control.entries import Allocated, Ended, Queued, Rejected, Row, Served
from slicewise.control.hardware import PartTurned, Phase
from slicewise.control.writer import Batch
from slicewise.core.fragmentation import Reading
from slicewise.service.capacity import Capacity
from slicewise.service.contacts import Contacts
from slicewise.service.failures import Failures
from slicewise.service.plant import Plant
from slicewise.service.streams import Streams

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_WAITS = (0.1, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_CREATIONS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_NEED = "need"
"""Stands for a profile where a request did not name one."""


class Histogram:
    """How often values fell into which bucket."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """How many values were at most each bound, and their sum."""
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return buckets, self._sum


class Metrics:
    """What has been counted, and how to measure the rest."""

    def __init__(
        self,
        plant: Plant,
        streams: Streams,
        contacts: Contacts,
        capacity: Callable[[], Capacity],
        failures: Failures,
    ) -> None:
        self._plant = plant
        self._contacts = contacts
        self._streams = streams
        self._capacity = capacity
        self._failures = failures
        self._limited: Counter[str] = Counter()
        self._malformed = 0
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[str, Histogram] = {}
        self._placed: Counter[tuple[str, str]] = Counter()
        self._rejected: Counter[tuple[str, str]] = Counter()
        self._queued = 0
        self._ended: Counter[str] = Counter()
        self._waits = Histogram(_WAITS)
        self._creations = Histogram(_CREATIONS)
        self._decide = Histogram(_SECONDS)
        self._commit = Histogram(_SECONDS)
        self._batch = Histogram(_SIZES)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(self))
        ProcessCollector(registry=self._registry)
        for collector in plant.source.collectors if plant.source is not None else ():
            self._registry.register(collector)

    def count_request(self, route: str, method: str, status: int, seconds: float | None) -> None:
        """A request was answered; None where it does not matter how long that took."""
        self._requests[route, method, status] += 1
        if seconds is None:
            return
        histogram = self._seconds.get(route)
        if histogram is None:
            histogram = self._seconds[route] = Histogram(_SECONDS)
        histogram.observe(seconds)

    def count_limited(self, limit: str) -> None:
        """A request was held up or refused, since its sender asks too often."""
        self._limited[limit] += 1

    def count_malformed(self) -> None:
        """A request could not be read."""
        self._malformed += 1

    def count_batch(self, batch: Batch) -> None:
        """A batch of this process's own decisions was committed."""
        if batch.commit_seconds:
            self._decide.observe(batch.decide_seconds)
            self._commit.observe(batch.commit_seconds)
            self._batch.observe(len(batch.told))
        for row in batch.rows:
            self._count_row(row)

    def count_followed(self, rows: Iterable[Row]) -> None:
        """Somebody else's rows; they count where this process decides beside the service."""
        source = self._plant.source
        if source is not None and source.leads():
            for row in rows:
                self._count_row(row)

    def _count_row(self, row: Row) -> None:
        entry = row.entry
        if isinstance(entry, Allocated):
            for part in entry.allocation.parts:
                self._placed[part.model, part.profile] += 1
            self._waits.observe(0)
        elif isinstance(entry, Ended):
            self._ended[str(entry.allocation.cause)] += 1
        else:
            self._count_other(row)

    def _count_other(self, row: Row) -> None:
        match row.entry:
            case Served(identity, _, parts):
                for part in parts:
                    self._placed[part.model, part.profile] += 1
                record = self._plant.state.allocations.get(identity)
                if record is not None:  # it may have ended in the same batch
                    self._waits.observe(max(0.0, row.at - record.requested))
            case Rejected(want=want, reason=reason):
                self._rejected[reason, want.profile or _NEED] += 1
            case Queued():
                self._queued += 1
            case PartTurned(identity, phase=Phase.ACTIVE):
                record = self._plant.state.allocations.get(identity)
                if record is not None and record.placed is not None:
                    self._creations.observe(max(0.0, row.at - record.placed))

    def text(self) -> bytes:
        """Everything, as Prometheus reads it."""
        return generate_latest(self._registry)

    # Families

    def families(self) -> Iterator[Metric]:
        """All metrics, by family."""
        yield from self._decisions()
        yield from self._cluster()
        yield from self._hardware()
        yield from self._process()

    def _decisions(self) -> Iterator[Metric]:
        yield _counter(
            "slicewise_instances_placed",
            "Instances placed by this process",
            ("model", "profile"),
            self._placed.items(),
        )
        yield _counter(
            "slicewise_requests_rejected",
            "Requests for allocations rejected by this process",
            ("reason", "profile"),
            self._rejected.items(),
        )
        yield _counter(
            "slicewise_requests_queued",
            "Requests for allocations that had to wait",
            (),
            [((), self._queued)],
        )
        yield _counter(
            "slicewise_allocations_ended",
            "Allocations that ended",
            ("cause",),
            [((cause,), count) for cause, count in self._ended.items()],
        )
        for name, text, histogram in (
            ("slicewise_queue_wait_seconds", "Time from request to placement", self._waits),
            ("slicewise_create_seconds", "Time from placed to active", self._creations),
            ("slicewise_decide_seconds", "Time to decide a batch", self._decide),
            ("slicewise_commit_seconds", "Time to make a batch durable", self._commit),
            ("slicewise_batch_size", "Requests that shared a commit", self._batch),
        ):
            yield _histogram(name, text, (), [((), histogram)])

    def _cluster(self) -> Iterator[Metric]:
        state, models = self._plant.state, self._capacity().models()
        whole = state.cluster
        yield _gauge("slicewise_gpus", "GPUs", ("model",), [((m.model,), m.gpus) for m in models])
        yield _gauge(
            "slicewise_gpus_schedulable",
            "GPUs that take new instances",
            ("model",),
            [((m.model,), m.schedulable_gpus) for m in models],
        )
        yield _gauge(
            "slicewise_slices",
            "Memory slices",
            ("model",),
            [((m.model,), m.slices) for m in models],
        )
        yield _gauge(
            "slicewise_slices_free",
            "Memory slices not taken",
            ("model",),
            [((m.model,), m.free_slices) for m in models],
        )
        yield _gauge(
            "slicewise_utilization",
            "Share of memory slices taken",
            ("model",),
            [((m.model,), 1 - m.free_slices / m.slices) for m in models],
        )
        yield _gauge(
            "slicewise_fragmentation",
            "Mean F of a GPU",
            ("reading",),
            [((str(reading),), whole.fragmentation(reading)) for reading in Reading],
        )
        yield _gauge(
            "slicewise_placements_left",
            "Windows open to a profile",
            ("model", "profile"),
            [((m.model, p), count) for m in models for p, count in m.placements.items()],
        )
        yield _gauge(
            "slicewise_gpus_with_room",
            "GPUs that could take a profile",
            ("model", "profile"),
            [((m.model, p), count) for m in models for p, count in m.fits.items()],
        )
        for name, text, value in (
            ("slicewise_gpus_active", "GPUs with an instance", whole.active_gpus),
            ("slicewise_instances", "Instances", sum(n.instances for n in state.nodes.values())),
            ("slicewise_nodes", "Nodes", len(state.nodes)),
            ("slicewise_tenants", "Tenants", len(state.tenants)),
            ("slicewise_queue_depth", "Requests that wait for room", len(state.waiting)),
        ):
            yield _gauge(name, text, (), [((), value)])

    def _hardware(self) -> Iterator[Metric]:
        state, contacts = self._plant.state, self._contacts
        agents = Counter({"reachable": 0, "unknown": 0})
        held: Counter[str] = Counter()
        foreign = 0
        for node in state.nodes.values():
            if node.agent is not None:
                agents["unknown" if UNKNOWN in node.holds else "reachable"] += 1
                foreign += len(node.agent.foreign)
                held.update(why for holds in node.agent.gpu_holds.values() for why in holds)
        phases = Counter({str(phase): state.phases[phase] for phase in Phase})
        del phases[str(Phase.GONE)]
        for name, text, label, counts in (
            ("slicewise_agents", "Agents, by whether they are heard of", "state", agents),
            ("slicewise_managed_instances", "Instances that agents make", "phase", phases),
            ("slicewise_gpus_held", "GPUs that take nothing new for themselves", "reason", held),
        ):
            yield _gauge(name, text, (label,), [((of,), count) for of, count in counts.items()])
        for name, text, value in (
            ("slicewise_foreign_instances", "Instances that are no allocation's", foreign),
            ("slicewise_agent_polls", "Agents that wait for news here", contacts.waiting),
        ):
            yield _gauge(name, text, (), [((), value)])
        yield _gauge(
            "slicewise_gpu_temperature_celsius",
            "Temperature of a GPU, as its agent last said",
            ("node", "gpu"),
            [((node, gpu), degrees) for node, gpu, degrees in contacts.temperatures()],
        )

    def _process(self) -> Iterator[Metric]:
        plant = self._plant
        writer = plant.writer
        trouble = plant.store_trouble is not None or (writer is not None and bool(writer.trouble))
        leads = plant.leads if plant.source is None else plant.source.leads()
        for name, text, value in (
            ("slicewise_is_leader", "Whether this process decides", int(leads)),
            ("slicewise_database_trouble", "Whether the database fails", int(trouble)),
            ("slicewise_journal_seq", "The last entry known here", plant.replica.seq),
            (
                "slicewise_images_damaged",
                "Images of the state that are not what was written",
                len(plant.store.warnings),
            ),
            ("slicewise_writer_waiting", "Requests not begun", writer.waiting if writer else 0),
            ("slicewise_event_streams", "Event streams open", self._streams.open),
            (
                "slicewise_clock_step_seconds",
                "By how much the wall clock is ahead of service time while that does not follow",
                plant.steady.step,
            ),
        ):
            yield _gauge(name, text, (), [((), value)])
        yield _counter(
            "slicewise_clock_steps",
            "Steps of the wall clock that service time did not follow",
            (),
            [((), plant.steady.steps)],
        )
        yield _counter(
            "slicewise_authentication_failures",
            "Requests without a valid token",
            ("reason",),
            [((why,), self._failures.by_reason[why]) for why in get_args(Failure)],
        )
        yield _counter(
            "slicewise_malformed_requests",
            "Requests that could not be read",
            (),
            [((), self._malformed)],
        )
        yield _counter(
            "slicewise_rate_limited",
            "Requests refused or held up by a rate limit",
            ("limit",),
            [((limit,), count) for limit, count in self._limited.items()],
        )
        yield _counter(
            "slicewise_http_requests",
            "Requests answered",
            ("route", "method", "status"),
            [((r, m, str(s)), count) for (r, m, s), count in self._requests.items()],
        )
        yield _histogram(
            "slicewise_http_seconds",
            "Time to answer a request",
            ("route",),
            [((route,), histogram) for route, histogram in self._seconds.items()],
        )


class _Collector(Collector):
    """Hands the families to Prometheus's registry."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()


_Labels = tuple[str, ...]


def _counter(
    name: str, text: str, labels: _Labels, values: Iterable[tuple[_Labels, int]]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def _gauge(
    name: str, text: str, labels: _Labels, values: Iterable[tuple[_Labels, float]]
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def _histogram(
    name: str, text: str, labels: _Labels, values: Iterable[tuple[_Labels, Histogram]]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for of, histogram in values:
        buckets, total = histogram.buckets()
        family.add_metric(of, buckets, total)
    return family
