"""Measure how long a release takes while many requests wait, with the pass that follows.

    .venv/bin/python benchmarks/queue_release.py [RELEASES] [SEED]

Twenty tenants on 100 A100-80GB, all of which are full. In every release one instance ends, and the
waiting requests of all profiles are tried. Then a window is reserved if one may be, and new
requests arrive until as many wait as before. The time of a release is a median, that of reserving
a mean, since most of the time there is nothing to reserve. Ratios compare with the smallest queue
of the same run, which has fewer lines than the others.

The second table is of floods of shapes: 1,000 requests wait as before, and each tenant of a flood
waits for as many kinds of requests as one may, profiles times numbers of instances.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import NamedTuple

from slicewise import (
    Cluster,
    Dispatcher,
    Instance,
    Queue,
    Rejection,
    Request,
    ReservationRules,
    Reservations,
    Scheduler,
    Shares,
    Ticket,
    load_geometry,
)
from slicewise.engine.reservations import LineKey, Window

A100 = load_geometry("A100-80GB")
WANTS = tuple(Request(profile.name) for profile in A100.plain_profiles)
TENANTS = tuple(f"tenant-{number}" for number in range(20))
GPUS = 100
SIZES = (100, 1_000, 10_000, 100_000)
FLOODS = (0, 1, 4, 12)
LINES = 100
"""The lines of one tenant, at most: the default of `limits.lines_per_tenant`."""


class FullCluster:
    """A full cluster with waiting requests: the least that a dispatcher needs around it."""

    def __init__(self, waiting: int, seed: int, rules: ReservationRules) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(Cluster.of(A100, GPUS), "least-lost")
        self.shares = Shares()
        self.shares.add_gpus(A100, GPUS)
        self.queue = Queue(self.shares)
        self.reservations = Reservations(self.scheduler.cluster)
        self.dispatcher = Dispatcher(self.scheduler, self.queue, self.reservations, self, rules)
        self.owner: dict[int, str] = {}
        self.running: list[Instance] = []
        self.now = 0.0
        self._number = 0
        while len(self.queue) < waiting:
            self.ask()

    def flood(self, tenants: int) -> None:
        """Let tenants wait for as many kinds of requests as they may."""
        kinds = [(want, count) for count in range(2, 65) for want in WANTS][:LINES]
        for tenant in range(tenants):
            for want, count in kinds:
                self._number += 1
                self.queue.enter(
                    Ticket(self._number, want, count, f"flood-{tenant}", entered=self.now)
                )

    def over_quota(self, ticket: Ticket) -> Rejection | None:
        """Return None: there are no quotas."""

    def accept(self, ticket: Ticket, instances: tuple[Instance, ...]) -> Rejection | None:
        """Start the instances of a waiting request."""
        self._run(ticket, instances)
        return None

    def reserve(self, line: LineKey, windows: tuple[Window, ...]) -> None:
        """Set the windows of a line."""
        self.reservations.set(line, windows)

    def ends(self, instance: Instance) -> float | None:
        """Return None: no end is known."""

    def ask(self) -> None:
        """A random tenant asks for a random profile."""
        self._number += 1
        wanted, tenant = self.rng.choice(WANTS), self.rng.choice(TENANTS)
        ticket = Ticket(self._number, wanted, tenant=tenant, entered=self.now)
        outcome = self.dispatcher.place(ticket, self.now)
        if isinstance(outcome, Rejection):
            self.queue.enter(ticket)
        else:
            self._run(ticket, outcome)

    def release(self) -> None:
        """A random instance ends, and waiting requests take its place."""
        self.now += 1.0
        place = self.rng.randrange(len(self.running))
        self.running[place], self.running[-1] = self.running[-1], self.running[place]
        instance = self.running.pop()
        self.scheduler.release(instance)
        self._charge(self.owner.pop(instance.id), instance, -1)
        self.dispatcher.freed(instance.gpu)
        self.dispatcher.room_appeared()
        self.dispatcher.serve(self.now)

    def _run(self, ticket: Ticket, instances: tuple[Instance, ...]) -> None:
        for instance in instances:
            self.running.append(instance)
            self.owner[instance.id] = ticket.tenant
            self._charge(ticket.tenant, instance, 1)
            self.queue.placed(A100, ticket.entered)

    def _charge(self, tenant: str, instance: Instance, sign: int) -> None:
        profile = A100.profile(instance.profile)
        self.shares.charge(tenant, A100, sign * profile.size, sign * profile.compute)


class Measured(NamedTuple):
    """The median time of a release and the mean time of reserving, in microseconds, and the
    mean number of attempts."""

    release: float
    grant: float
    attempts: float


def measure(waiting: int, releases: int, seed: int, flooding: int = 0) -> Measured:
    """Measure releases, and the search for a window to reserve after each of them."""
    cluster = FullCluster(waiting, seed, ReservationRules(after=10.0))
    cluster.flood(flooding)
    waiting = len(cluster.queue)
    release: list[int] = []
    grant: list[int] = []
    attempts = 0
    for _ in range(releases):
        while len(cluster.queue) < waiting:
            cluster.ask()
        tried = cluster.dispatcher.attempts
        times = [time.perf_counter_ns()]
        cluster.release()
        times.append(time.perf_counter_ns())
        cluster.dispatcher.grant(cluster.now)
        times.append(time.perf_counter_ns())
        release.append(times[1] - times[0])
        grant.append(times[2] - times[1])
        attempts += cluster.dispatcher.attempts - tried
    return Measured(
        statistics.median(release) / 1000, statistics.fmean(grant) / 1000, attempts / releases
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    made.add_argument("releases", type=int, nargs="?", default=500)
    made.add_argument("seed", type=int, nargs="?", default=1)
    return made


def main(options: argparse.Namespace) -> None:
    """Measure every size and print a table."""
    print(f"{len(TENANTS)} tenants, {GPUS} A100-80GB, {options.releases} releases\n")
    table("waiting", [(size, size, 0) for size in SIZES], options)
    print()
    floods = [(flooding * LINES, 1_000, flooding) for flooding in FLOODS]
    table("lines of floods", floods, options)


def table(what: str, rows: list[tuple[int, int, int]], options: argparse.Namespace) -> None:
    """Print a table: for each row what it is called, how many wait, and how many tenants flood."""
    print(f"| {what} | release, µs | ratio | reserving, µs | ratio | attempts |")
    print("|--:|--:|--:|--:|--:|--:|")
    first: Measured | None = None
    for name, waiting, flooding in rows:
        found = measure(waiting, options.releases, options.seed, flooding)
        first = first or found
        cells = [
            f"{name:,}",
            f"{found.release:.0f}",
            f"{found.release / first.release:.2f}",
            f"{found.grant:.0f}",
            f"{found.grant / first.grant:.2f}",
            f"{found.attempts:.1f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(parser().parse_args())
