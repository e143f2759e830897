"""A stream of pods through a Kubernetes cluster, the same for whoever allocates.

1. A burst into the empty cluster shows the speed; then it is empty again.
2. The cluster ages, some nodes at a time while the others are cordoned: the stock scheduler's time
   for a pod grows with nodes times pools, and a whole cluster would take hours. Each such wave gets
   its share of the load at once, and then lives for some mean lifetimes, in small steps: those
   whose time is over leave, those who come in that time come, and the clock stands still until
   everybody runs for whom there is a place. So a slow allocator has all the time it needs, and what
   is seen is its choice of places alone.
3. It goes on like this with all nodes open, but not for so long.
4. All nodes are open, pods come at a fixed rate by the real clock, each runs for its lifetime from
   the moment it runs, and is deleted. The second half of this is measured.

Users are not patient without end: who waits for too long is deleted, and counted as having given
up. While the clock stands still that is whoever waits at the end of a step.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.kube_plan import Arrival, Plan, arrivals, at_once, in_steps
from benchmarks.kube_sites import Allocator, Site
from benchmarks.kube_world import Life, Sample, World, cpu_seconds

from slicewise.sim.mix import Mix

Measured = dict[str, float]

_TICK = 0.5
_PATIENCE = 1200.0
_OVERLOOKED = 15.0
"""A place is open for a pod, and for so many seconds nobody is served: it is not waited for."""


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
        self._profiles = [profile.name for profile in mix.profiles]
        self._arrivals = arrivals(mix, plan.seed)
        self._numbers = itertools.count()
        self._lifetimes: dict[str, float] = {}
        self._leaving: list[tuple[float, str]] = []
        """When pods that run are deleted, by the clock; only while the world's lock is held."""
        self._capacity = len(site.names) * site.world.gpus * mix.geometry.slices
        self._mean = plan.mean_seconds(mix, self._capacity)
        self._clock: Callable[[], float] = lambda: 0.0
        """The time of the stream, in mean lifetimes."""
        self._world.on_running = self._begins
        self._world.cpus = plan.cpus
        self._world.follow_places = True

    def run(self) -> dict[str, Any]:
        """The burst, the ageing, all nodes together, and the stream by the real clock."""
        self._world.make_templates(self._profiles, self._allocator.device_class)
        self._allocator.start()
        self._warm_up()
        load_before = os.getloadavg()[0]
        burst = self._burst()
        self._say(f"    burst: {burst['pods_per_second']:.2f} pods/s")
        began = time.monotonic()
        aged = self._age()
        together = self._together()
        took = time.monotonic() - began
        stream = self._stream()
        return {
            "mean_lifetime_seconds": self._mean,
            "burst": burst,
            "aged_seconds": took,
            "aged": aged,
            "together": together,
            "stream": stream,
            "overlaps": len(self._world.overlaps),
            "controller": self._allocator.report(),
            "load_average": [load_before, os.getloadavg()[0]],
        }

    def _warm_up(self) -> None:
        """One pod comes and goes, so that everybody is awake."""
        world = self._world
        world.create("first", self._profiles[-1]).result()
        if not world.until("the first pod runs", lambda: world.running > 0, _PATIENCE):
            raise SystemExit(f"the first pod does not run: {self._allocator.name}")
        self._remove(["first"])
        world.lives.clear()

    def _begins(self, life: Life) -> None:
        lifetime = self._lifetimes.pop(life.name, None)
        if lifetime is not None:
            heapq.heappush(self._leaving, (self._clock() + lifetime, life.name))

    def _arrive(self, arrival: Arrival, in_turn: bool = False) -> str:
        name = f"p{next(self._numbers)}"
        with self._world.lock:
            self._lifetimes[name] = arrival.lifetime
        made = self._world.create(name, arrival.profile)
        if in_turn:
            made.result()
        return name

    def _over(self) -> list[str]:
        """Those whose time is over; they are to be deleted."""
        with self._world.lock:
            now, over = self._clock(), []
            while self._leaving and self._leaving[0][0] <= now:
                over.append(heapq.heappop(self._leaving)[1])
        return over

    def _remove(self, names: Iterable[str]) -> None:
        """Delete pods, and wait until their devices are free."""
        world, gone = self._world, list(names)
        for name in gone:
            world.delete(name)
        if not world.until(
            "they are gone",
            lambda: all(world.lives[name].gone for name in gone) and not world.lingering(),
            _PATIENCE,
        ):
            raise SystemExit("pods that are deleted do not go")

    def _give_up(self, lives: Iterable[Life]) -> list[str]:
        """Users lose patience; returns whose pods are to be deleted."""
        names = []
        for life in lives:
            life.gave_up = time.monotonic()
            names.append(life.name)
        return names

    def _burst(self) -> dict[str, Any]:
        """Pods at once into the empty cluster, until all run; then they go."""
        began = time.monotonic()
        world, pods = self._world, self._plan.burst
        names = [self._arrive(next(self._arrivals)) for _ in range(pods)]
        if not world.until("all run", lambda: world.running >= pods, _PATIENCE):
            raise SystemExit("the burst does not run")
        took = time.monotonic() - began
        self._remove(names)
        self._leaving.clear()
        return {"pods": pods, "seconds": took, "pods_per_second": pods / took}

    # The ageing, by a clock that stands still until everybody is served

    def _age(self) -> Measured:
        """Some nodes after the other get their pods, and live with them for a while."""
        plan, world = self._plan, self._world
        waves = plan.waves(len(self._site.names))
        found: list[Measured] = []
        for number, nodes in enumerate(waves):
            began = time.monotonic()
            if len(waves) > 1:
                self._site.open_only([self._site.names[node] for node in nodes])
            world.opened = range(nodes.start * world.gpus, nodes.stop * world.gpus)
            slices = plan.load * len(world.opened) * self._mix.geometry.slices
            others = world.running
            self._step(0.0, at_once(self._arrivals, slices))
            batches = in_steps(self._arrivals, self._mix, plan, slices, plan.steps)
            found.append(self._live(batches, 0, plan.unmeasured))
            found[-1]["running"] -= others
            self._tell(f"wave {number + 1} of {len(waves)}", found[-1], began)
        self._site.open_only(self._site.names)
        world.opened = range(len(self._site.names) * world.gpus)
        return self._shares({name: sum(wave[name] for wave in found) for name in found[0]})

    def _together(self) -> Measured:
        """It goes on like this with all nodes open."""
        plan, began = self._plan, time.monotonic()
        steps, slices = plan.steps_together, plan.load * self._capacity
        batches = in_steps(self._arrivals, self._mix, plan, slices, steps)
        found = self._live(batches, plan.steps, steps // 2)
        self._tell("all nodes", found, began)
        return self._shares(found)

    def _live(self, batches: Iterable[list[Arrival]], first: int, unmeasured: int) -> Measured:
        """Step after step; what the steps were like, but for the first ones."""
        steps = [
            (len(batch), *self._step((first + number + 1) * self._plan.step, batch))
            for number, batch in enumerate(batches)
        ][unmeasured:]
        samples = [sample for _, sample, _ in steps]
        means = {
            name: statistics.fmean(getattr(sample, name) for sample in samples)
            for name in ("running", "slices", "usable", "spent", "blocked")
        }
        scores = statistics.fmean(sample.fragmentation for sample in samples)
        return {
            **means,
            "scores": scores * len(self._world.opened),
            "came": sum(came for came, _, _ in steps),
            "gave_up": sum(sample.pending for sample in samples),
            "stuck": sum(sample.stuck for sample in samples),
            "stranded": sum(sample.stranded for sample in samples),
            "overlooked": sum(overlooked for _, _, overlooked in steps),
        }

    def _shares(self, found: Measured) -> Measured:
        shares = {
            f"{name}_share": found[name] / found["came"]
            for name in ("gave_up", "stuck", "stranded")
        }
        return {
            **found,
            **shares,
            "slices_share": found["slices"] / self._capacity,
            "fragmentation": found["scores"] * self._mix.geometry.slices / self._capacity,
        }

    def _tell(self, what: str, found: Measured, began: float) -> None:
        self._say(
            f"    {what}: {found['running']:.0f} running, {found['gave_up']:.0f} of "
            f"{found['came']:.0f} gave up, {time.monotonic() - began:.0f} s"
        )

    def _step(self, now: float, batch: Iterable[Arrival]) -> tuple[Sample, int]:
        """Some leave, some come; how it is when all are served, and who was overlooked."""
        world = self._world
        self._clock = lambda: now
        self._remove(self._over())
        for arrival in batch:
            self._arrive(arrival, in_turn=True)
        overlooked = self._settle()
        sample = world.sample(self._profiles, 0.0)
        if math.isfinite(self._plan.patience):
            with world.lock:
                waiting = list(world.waiting.values())
            self._remove(self._give_up(waiting))
        return sample, overlooked

    def _settle(self) -> int:
        """Wait until everybody runs for whom a place is open; returns who was overlooked.

        Nobody leaves meanwhile, so that who finds no place now will not find one later.
        """
        world = self._world
        while True:
            with world.lock:
                seen = world.steps
            world.until(
                "something happens",
                lambda: world.steps != seen or not world.unserved(),  # noqa: B023
                _OVERLOOKED,
            )
            with world.lock:
                unserved = len(world.unserved())
                if not unserved or world.steps == seen:
                    return unserved

    # The open stream, by the real clock

    def _stream(self) -> dict[str, Any]:
        plan, world = self._plan, self._world
        scheduler = self._site.plane.process_id("scheduler")
        began = time.monotonic()
        aged, mean = self._clock(), self._mean
        self._clock = lambda: aged + (time.monotonic() - began) / mean
        cpu = cpu_seconds(scheduler)
        measured_from = began + plan.seconds / 2
        ends = began + plan.seconds
        nearest, tick = began, began
        samples: list[Sample] = []
        while (now := time.monotonic()) < ends:
            while nearest <= now:
                arrival = next(self._arrivals)
                self._arrive(arrival)
                nearest += arrival.gap / plan.rate
            with world.lock:
                tired = [
                    life
                    for life in world.waiting.values()
                    if life.gave_up is None and now - life.created > plan.patience
                ]
            for name in self._over() + self._give_up(tired):
                world.delete(name)
            if now >= tick:
                tick = now + _TICK
                if now >= measured_from:
                    samples.append(world.sample(self._profiles))
            time.sleep(max(0.0, min(nearest, tick) - time.monotonic()))
        used = cpu_seconds(scheduler) - cpu
        with world.lock:
            lives = [life for life in world.lives.values() if life.created >= began]
        return {
            **summary(samples, lives, ends, min(plan.patience, plan.seconds / 2)),
            "slices_share": statistics.fmean(s.slices for s in samples) / self._capacity,
            "scheduler_cpu": used / plan.seconds,
        }


def summary(
    samples: Sequence[Sample], lives: Sequence[Life], end: float, patience: float
) -> dict[str, Any]:
    """Means over the samples, what became of the pods, and how long those took that had room.

    Pods that came so late that their users would still wait are left out.
    """
    means = {
        name: statistics.fmean(getattr(sample, name) for sample in samples)
        for name in asdict(samples[0])
        if name != "at"
    }
    known = [life for life in lives if end - life.created > patience]
    roomy = [life for life in known if life.roomy]
    kept = [life for life in roomy if life.lost_to is None]
    return {
        **means,
        "came": len(lives),
        "known": len(known),
        "ran": sum(life.running is not None for life in known),
        "had_room": len(roomy),
        "had_room_and_ran": sum(life.running is not None for life in roomy),
        "lost_room_to_older": sum(life.lost_to == "older" for life in roomy),
        "lost_room_to_younger": sum(life.lost_to == "younger" for life in roomy),
        "to_running": percentiles(_times(roomy)),
        "to_running_room_kept": percentiles(_times(kept)),
    }


def _times(lives: Iterable[Life]) -> list[float]:
    return [life.running - life.created for life in lives if life.running is not None]


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Of times, in seconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {
        f"p{rank}": ordered[min(len(ordered) * rank // 100, len(ordered) - 1)]
        for rank in (50, 90, 99)
    }
    return {**ranks, "most": ordered[-1]}
