"""A release costs as much with 10,000 waiting requests as with 1,000: attempts are counted."""

from __future__ import annotations

import random

import pytest
from tests.engine.cluster_in_use import ClusterInUse

from slicewise.catalog import load_geometry
from slicewise.engine.dispatcher import Dispatcher
from slicewise.engine.queue import Line, Queue
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.shares import Order

A100 = load_geometry("A100-80GB")
PROFILES = [profile.name for profile in A100.plain_profiles]
TENANTS = [f"tenant-{number}" for number in range(20)]
RELEASES = 60


def with_waiting(number: int, after: float) -> ClusterInUse:
    """A full cluster with so many waiting requests of twenty tenants."""
    rng = random.Random(1)
    cluster = ClusterInUse([(A100, 10)], rules=ReservationRules(after, 0.2))
    while len(cluster.queue) < number:
        cluster.ask(rng.choice(TENANTS), rng.choice(PROFILES))
    return cluster


def attempts_of_releases(cluster: ClusterInUse) -> list[int]:
    """How often the policy is asked in each of some releases."""
    rng, made = random.Random(2), []
    for _ in range(RELEASES):
        before = cluster.dispatcher.attempts
        cluster.now += 1.0
        cluster.end(rng.choice(sorted(cluster.running)))
        made.append(cluster.dispatcher.attempts - before)
    return made


@pytest.mark.parametrize("after", [float("inf"), 5.0], ids=["without", "with reservations"])
def test_attempts_do_not_depend_on_how_many_wait(after: float) -> None:
    clusters = [with_waiting(number, after) for number in (1_000, 10_000)]
    assert clusters[0].queue.shapes == clusters[1].queue.shapes == len(PROFILES)
    few, many = (attempts_of_releases(cluster) for cluster in clusters)
    for cluster, made in zip(clusters, (few, many), strict=True):
        assert cluster.served
        reserved = cluster.rules.most(cluster.cluster.gpus)
        assert max(made) <= max(1, A100.slices) + len(PROFILES) * (1 + reserved)
    assert sum(many) <= 1.25 * sum(few), "the same work for ten times as many"


class CountedQueue(Queue):
    """Counts how often the place of a line in the fair order is asked for."""

    ordered = 0

    def order_of(self, line: Line) -> Order:
        self.ordered += 1
        return super().order_of(line)


def ordered_in_releases(floods: int) -> int:
    """How often lines are put in order in some releases, while one tenant floods with shapes."""
    rng = random.Random(1)
    rules = ReservationRules(5.0, 0.2)
    cluster = ClusterInUse([(A100, 10)], rules=rules, kinds=(CountedQueue, Dispatcher))
    while len(cluster.queue) < 200:
        cluster.ask(rng.choice(TENANTS), rng.choice(PROFILES))
    for count in range(2, 2 + floods):
        cluster.ask("flood", "7g.80gb", count)
    attempts_of_releases(cluster)
    assert isinstance(cluster.queue, CountedQueue)
    return cluster.queue.ordered


def test_lines_that_cannot_be_served_are_not_put_in_order() -> None:
    """A flood of shapes that find no room costs the others no more than a look at each request."""
    few, many = ordered_in_releases(1), ordered_in_releases(60)
    assert many <= 1.5 * few, "the shapes of the flood are not sorted in every pass"
