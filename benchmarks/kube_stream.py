"""A stream of pods through a Kubernetes cluster, the same for whoever allocates.

1. A burst into the empty cluster shows the speed.
2. The cluster is filled to a load, some nodes at a time while the others are cordoned: the stock
   scheduler's time for a pod grows with nodes times pools, and a full cluster would take hours. On
   each such wave half of the pods leave once, and others take their place.
3. All nodes are open again, pods arrive at a fixed rate, each runs for its lifetime from the moment
   it runs, and is deleted. Lifetimes are such that what is asked for is the load, as a share of all
   memory slices. The second half of this is measured.

While the cluster is filled the clock of the stream stands still, so that a slow allocator gets the
same stream.
"""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from benchmarks.kube_sites import Allocator, Site
from benchmarks.kube_world import STUCK_SECONDS, Life, Sample, World

from slicewise.sim.mix import Mix

_TICK = 0.5
_PATIENCE = 1200.0
_SETTLED = 4.0
"""When no pod has begun to run for so many seconds, the rest waits for room."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A pod to come: when, what, and how long it runs, in mean lifetimes."""

    gap: float
    profile: str
    size: int
    lifetime: float


@dataclass(frozen=True)
class Plan:
    """How long, how fast, how much."""

    loads: tuple[float, ...]
    rate: float
    """Pods a second."""
    seconds: float
    """For each load; the second half is measured."""
    burst: int
    """Pods that come at once into the empty cluster."""
    wave: int
    """Nodes that are filled at a time; 0 for all."""
    seed: int = 1


def arrivals(mix: Mix, seed: int) -> Iterator[Arrival]:
    """The stream, without end; the same for the same seed."""
    rng = np.random.default_rng([seed, *mix.name.encode()])
    while True:
        kind = int(rng.choice(len(mix.profiles), p=mix.probabilities))
        profile = mix.profiles[kind]
        gap, lifetime = rng.exponential(1.0), rng.exponential(1.0)
        yield Arrival(float(gap), profile.name, profile.size, float(lifetime))


class Stream:
    """One stream through one cluster."""

    def __init__(
        self, site: Site, allocator: Allocator, mix: Mix, plan: Plan, say: Callable[[str], None]
    ) -> None:
        self._site = site
        self._world: World = site.world
        self._allocator = allocator
        self._mix = mix
        self._plan = plan
        self._say = say
        self._arrivals = arrivals(mix, plan.seed)
        self._numbers = itertools.count()
        self._means: dict[str, float] = {}
        self._lifetimes: dict[str, float] = {}
        self._leaving: list[tuple[float, str]] = []
        """When pods that run are deleted; only while the world's lock is held."""
        self._asked = 0
        """Slices that all pods which are not gone ask for."""
        self._paused = 0.0
        """How long the clock of the stream has stood still."""
        self._stopped: float | None = None
        """Since when it stands still."""
        self._capacity = len(site.names) * site.world.gpus * mix.geometry.slices
        self._world.on_running = self._begins

    def run(self) -> dict[str, Any]:
        """Fill, then stream at each load."""
        self._world.make_templates(
            [p.name for p in self._mix.profiles], self._allocator.device_class
        )
        self._allocator.start()
        self._warm_up()
        found: dict[str, Any] = {"burst": self._burst(), "loads": []}
        self._say(f"    burst: {found['burst']['pods_per_second']:.2f} pods/s")
        for number, load in enumerate(self._plan.loads):
            began = time.monotonic()
            self._fill(load, turnover=number == 0)
            took = time.monotonic() - began
            self._say(f"    filled to {load:g} in {took:.0f} s")
            found["loads"].append({"fill_seconds": took, **self._stream(load)})
        found["overlaps"] = len(self._world.overlaps)
        found["controller"] = self._allocator.report()
        return found

    def _warm_up(self) -> None:
        """One pod comes and goes, so that everybody is awake."""
        world = self._world
        world.create("first", self._mix.profiles[-1].name).result()
        if not world.until("the first pod runs", lambda: world.running > 0, _PATIENCE):
            raise SystemExit(f"the first pod does not run: {self._allocator.name}")
        world.delete("first").result()
        world.until("it is gone", lambda: not any(world.cluster.instances()), _PATIENCE)
        world.lives.clear()

    def _clock(self) -> float:
        """The time of the stream, which stands still while a burst is served."""
        return (self._stopped or time.monotonic()) - self._paused

    def _begins(self, life: Life) -> None:
        lifetime = self._lifetimes.pop(life.name, None)
        if lifetime is not None:
            heapq.heappush(self._leaving, (self._clock() + lifetime, life.name))

    def _arrive(self, arrival: Arrival, load: float) -> str:
        mean = load * self._capacity / self._plan.rate / self._mix.mean_size
        name = f"p{next(self._numbers)}"
        with self._world.lock:
            self._means[name] = mean
            self._lifetimes[name] = arrival.lifetime * mean
        self._asked += arrival.size
        self._world.create(name, arrival.profile)
        return name

    def _burst(self) -> dict[str, Any]:
        """Pods at once into the empty cluster, until all run."""
        load = self._plan.loads[0]
        self._stop_clock()
        began = time.monotonic()
        for _ in range(self._plan.burst):
            self._arrive(next(self._arrivals), load)
        world = self._world
        if not world.until("all run", lambda: world.running >= self._plan.burst, _PATIENCE):
            raise SystemExit("the burst does not run")
        took = time.monotonic() - began
        self._go_on()
        return {
            "pods": self._plan.burst,
            "seconds": took,
            "pods_per_second": self._plan.burst / took,
        }

    def _fill(self, load: float, turnover: bool) -> None:
        """Fill the cluster until so much is asked for, a wave of nodes after the other."""
        self._stop_clock()
        names = self._site.names
        size = self._plan.wave or len(names)
        asked = self._asked
        for first in range(0, len(names), size):
            wave = names[first : first + size]
            if size < len(names):
                self._site.open_only(wave)
            target = asked + (load * self._capacity - asked) * min(1, (first + size) / len(names))
            made = self._ask_for(target, load)
            if turnover:
                leaving = [name for name in made if self._leaves_early(name)]
                for name in leaving:
                    self._asked -= self._world.lives[name].size
                    self._world.delete(name)
                self._world.until(
                    "they are gone",
                    lambda: all(self._world.lives[name].gone is not None for name in leaving),  # noqa: B023
                    _PATIENCE,
                )
                self._ask_for(target, load)
        self._site.open_only(names)
        self._go_on()

    def _leaves_early(self, name: str) -> bool:
        """Whether a pod that runs has left when half of all have."""
        with self._world.lock:
            for index, (when, other) in enumerate(self._leaving):
                if other == name:
                    left = when - self._clock() - math.log(2) * self._means[name]
                    del self._leaving[index]
                    if left > 0:
                        self._leaving.append((self._clock() + left, name))
                    heapq.heapify(self._leaving)
                    return left <= 0
        return False  # it waits

    def _ask_for(self, target: float, load: float) -> list[str]:
        """Make pods at once until so much is asked for, and wait until they run, or no more do."""
        world = self._world
        made: list[str] = []
        while self._asked < target:
            made.append(self._arrive(next(self._arrivals), load))
        still, last = time.monotonic(), -1
        while time.monotonic() - still < _SETTLED:
            with world.lock:
                running = world.running
                if all(world.lives[name].running is not None for name in made):
                    break
            if running != last:
                last, still = running, time.monotonic()
            time.sleep(0.1)
        return made

    def _stop_clock(self) -> None:
        self._stopped = time.monotonic()

    def _go_on(self) -> None:
        with self._world.lock:
            assert self._stopped is not None
            self._paused += time.monotonic() - self._stopped
            self._stopped = None

    def _depart(self) -> None:
        """Delete those whose time is over."""
        with self._world.lock:
            over = []
            while self._leaving and self._leaving[0][0] <= self._clock():
                over.append(heapq.heappop(self._leaving)[1])
        for name in over:
            self._asked -= self._world.lives[name].size
            self._world.delete(name)

    def _stream(self, load: float) -> dict[str, Any]:
        plan, world = self._plan, self._world
        began = time.monotonic()
        measured_from = began + plan.seconds / 2
        ends = began + plan.seconds
        nearest, tick = began, began
        samples: list[Sample] = []
        while (now := time.monotonic()) < ends:
            while nearest <= now:
                arrival = next(self._arrivals)
                self._arrive(arrival, load)
                nearest += arrival.gap / plan.rate
            self._depart()
            if now >= tick:
                tick = now + _TICK
                if now >= measured_from:
                    samples.append(world.sample())
            time.sleep(max(0.0, min(nearest, tick) - time.monotonic()))
        with world.lock:
            lives = [life for life in world.lives.values() if life.created >= began]
        return {"load": load, **summary(samples, lives, ends, self._capacity)}


def summary(
    samples: Sequence[Sample], lives: Sequence[Life], end: float, capacity: int
) -> dict[str, Any]:
    """Means over the samples, and how long pods took that had room."""
    means = {
        name: statistics.fmean(getattr(sample, name) for sample in samples)
        for name in asdict(samples[0])
        if name != "at"
    }
    roomy = [life for life in lives if life.roomy and end - life.created > STUCK_SECONDS]
    took = [life.running - life.created for life in roomy if life.running is not None]
    served = [life for life in lives if end - life.created > STUCK_SECONDS]
    soon = sum(
        life.running is not None and life.running - life.created <= STUCK_SECONDS for life in served
    )
    return {
        **means,
        "slices_share": means["slices"] / capacity,
        "arrived": len(lives),
        "soon_share": soon / len(served) if served else None,
        "had_room": len(roomy),
        "had_room_and_ran": len(took),
        "to_running": percentiles(took),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Of times, in seconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        f"p{rank}": ordered[min(len(ordered) * rank // 100, len(ordered) - 1)]
        for rank in (50, 90, 99)
    }
