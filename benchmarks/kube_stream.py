"""Run a stream of pods through a Kubernetes cluster, the same for every allocator.

1. A burst into the empty cluster measures the speed; then its pods are deleted.
2. The cluster ages, in waves of some nodes with the others cordoned: the stock scheduler's time per
   pod grows with nodes times pools, and a whole cluster would take hours. Each wave gets its share
   of the load at once, and then runs for some mean lifetimes in small steps: pods end, new ones
   arrive, and the simulated clock stops until every pod with an open placement runs. A slow
   allocator thus has all the time it needs, and only its placements are measured.
3. The same with all nodes schedulable, for a shorter time.
4. With all nodes schedulable, pods arrive at a fixed rate in real time. Each is deleted after its
   lifetime, counted from the moment it runs. The second half is measured.

Users have limited patience: a pod that waits too long is deleted and counted as having given up.
While the clock is stopped, these are the pods that still wait at the end of a step.
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
from benchmarks.kube_pods import PodHistory, PodTracker, Sample, cpu_seconds
from benchmarks.kube_sites import Allocator, Site

from slicewise.lab.mix import Mix

Measured = dict[str, float]

_TICK = 0.5
_PATIENCE = 1200.0
_OVERLOOKED = 15.0
"""If no pod is served for so many seconds, pods with an open placement count as overlooked."""


class Stream:
    """A stream of pods through one cluster."""

    def __init__(
        self, site: Site, allocator: Allocator, mix: Mix, plan: Plan, say: Callable[[str], None]
    ) -> None:
        self._site = site
        self._tracker: PodTracker = site.tracker
        self._allocator = allocator
        self._mix = mix
        self._plan = plan
        self._say = say
        self._profiles = [profile.name for profile in mix.profiles]
        self._arrivals = arrivals(mix, plan.seed)
        self._numbers = itertools.count()
        self._lifetimes: dict[str, float] = {}
        self._leaving: list[tuple[float, str]] = []
        """Heap of (end time, name) of running pods; guarded by the tracker's lock."""
        self._capacity = len(site.names) * site.tracker.gpus * mix.geometry.slices
        self._mean = plan.mean_seconds(mix, self._capacity)
        self._clock: Callable[[], float] = lambda: 0.0
        """Returns the time of the stream in mean lifetimes."""
        self._tracker.on_running = self._begins
        self._tracker.cpus = plan.cpus
        self._tracker.follow_places = True

    def run(self) -> dict[str, Any]:
        """Run the burst, the waves, all nodes together, and the open stream."""
        self._tracker.make_templates(self._profiles, self._allocator.device_class)
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
            "overlaps": len(self._tracker.overlaps),
            "controller": self._allocator.report(),
            "load_average": [load_before, os.getloadavg()[0]],
        }

    def _warm_up(self) -> None:
        """Create and delete one pod, to warm up all components."""
        tracker = self._tracker
        tracker.create("first", self._profiles[-1]).result()
        if not tracker.until("the first pod runs", lambda: tracker.running > 0, _PATIENCE):
            raise SystemExit(f"the first pod does not run: {self._allocator.name}")
        self._remove(["first"])
        tracker.lives.clear()

    def _begins(self, life: PodHistory) -> None:
        lifetime = self._lifetimes.pop(life.name, None)
        if lifetime is not None:
            heapq.heappush(self._leaving, (self._clock() + lifetime, life.name))

    def _arrive(self, arrival: Arrival, in_turn: bool = False) -> str:
        name = f"p{next(self._numbers)}"
        with self._tracker.lock:
            self._lifetimes[name] = arrival.lifetime
        made = self._tracker.create(name, arrival.profile)
        if in_turn:
            made.result()
        return name

    def _over(self) -> list[str]:
        """Return the pods at the end of their lifetime."""
        with self._tracker.lock:
            now, over = self._clock(), []
            while self._leaving and self._leaving[0][0] <= now:
                over.append(heapq.heappop(self._leaving)[1])
        return over

    def _remove(self, names: Iterable[str]) -> None:
        """Delete pods and wait until their devices are free."""
        tracker, gone = self._tracker, list(names)
        for name in gone:
            tracker.delete(name)
        if not tracker.until(
            "they are gone",
            lambda: all(tracker.lives[name].gone for name in gone) and not tracker.lingering(),
            _PATIENCE,
        ):
            raise SystemExit("pods that are deleted do not go")

    def _give_up(self, lives: Iterable[PodHistory]) -> list[str]:
        """Mark pods as given up and return the names to delete."""
        names = []
        for life in lives:
            life.gave_up = time.monotonic()
            names.append(life.name)
        return names

    def _burst(self) -> dict[str, Any]:
        """Create pods at once in the empty cluster, wait until all run, and delete them."""
        began = time.monotonic()
        tracker, pods = self._tracker, self._plan.burst
        names = [self._arrive(next(self._arrivals)) for _ in range(pods)]
        if not tracker.until("all run", lambda: tracker.running >= pods, _PATIENCE):
            raise SystemExit("the burst does not run")
        took = time.monotonic() - began
        self._remove(names)
        self._leaving.clear()
        return {"pods": pods, "seconds": took, "pods_per_second": pods / took}

    # Ageing, with a simulated clock

    def _age(self) -> Measured:
        """Fill and age the nodes wave by wave."""
        plan, tracker = self._plan, self._tracker
        waves = plan.waves(len(self._site.names))
        found: list[Measured] = []
        for number, nodes in enumerate(waves):
            began = time.monotonic()
            if len(waves) > 1:
                self._site.open_only([self._site.names[node] for node in nodes])
            tracker.opened = range(nodes.start * tracker.gpus, nodes.stop * tracker.gpus)
            slices = plan.load * len(tracker.opened) * self._mix.geometry.slices
            others = tracker.running
            self._step(0.0, at_once(self._arrivals, slices))
            batches = in_steps(self._arrivals, self._mix, plan, slices, plan.steps)
            found.append(self._live(batches, 0, plan.unmeasured))
            found[-1]["running"] -= others
            self._tell(f"wave {number + 1} of {len(waves)}", found[-1], began)
        self._site.open_only(self._site.names)
        tracker.opened = range(len(self._site.names) * tracker.gpus)
        return self._shares({name: sum(wave[name] for wave in found) for name in found[0]})

    def _together(self) -> Measured:
        """Continue with all nodes schedulable."""
        plan, began = self._plan, time.monotonic()
        steps, slices = plan.steps_together, plan.load * self._capacity
        batches = in_steps(self._arrivals, self._mix, plan, slices, steps)
        found = self._live(batches, plan.steps, steps // 2)
        self._tell("all nodes", found, began)
        return self._shares(found)

    def _live(self, batches: Iterable[list[Arrival]], first: int, unmeasured: int) -> Measured:
        """Run the steps and return the samples after the unmeasured ones."""
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
            "scores": scores * len(self._tracker.opened),
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
        """End and create pods; return a sample of the settled cluster, and the overlooked pods."""
        tracker = self._tracker
        self._clock = lambda: now
        self._remove(self._over())
        for arrival in batch:
            self._arrive(arrival, in_turn=True)
        overlooked = self._settle()
        sample = tracker.sample(self._profiles, 0.0)
        if math.isfinite(self._plan.patience):
            with tracker.lock:
                waiting = list(tracker.waiting.values())
            self._remove(self._give_up(waiting))
        return sample, overlooked

    def _settle(self) -> int:
        """Wait until every pod with an open placement runs; return the overlooked ones.

        No pod ends in the meantime, so a pod without a placement now will not get one later.
        """
        tracker = self._tracker
        while True:
            with tracker.lock:
                seen = tracker.steps
            tracker.until(
                "something happens",
                lambda: tracker.steps != seen or not tracker.unserved(),  # noqa: B023
                _OVERLOOKED,
            )
            with tracker.lock:
                unserved = len(tracker.unserved())
                if not unserved or tracker.steps == seen:
                    return unserved

    # The open stream, in real time

    def _stream(self) -> dict[str, Any]:
        plan, tracker = self._plan, self._tracker
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
            with tracker.lock:
                tired = [
                    life
                    for life in tracker.waiting.values()
                    if life.gave_up is None and now - life.created > plan.patience
                ]
            for name in self._over() + self._give_up(tired):
                tracker.delete(name)
            if now >= tick:
                tick = now + _TICK
                if now >= measured_from:
                    samples.append(tracker.sample(self._profiles))
            time.sleep(max(0.0, min(nearest, tick) - time.monotonic()))
        used = cpu_seconds(scheduler) - cpu
        with tracker.lock:
            lives = [life for life in tracker.lives.values() if life.created >= began]
        return {
            **summary(samples, lives, ends, min(plan.patience, plan.seconds / 2)),
            "slices_share": statistics.fmean(s.slices for s in samples) / self._capacity,
            "scheduler_cpu": used / plan.seconds,
        }


def summary(
    samples: Sequence[Sample], lives: Sequence[PodHistory], end: float, patience: float
) -> dict[str, Any]:
    """Return means over the samples, the outcomes of the pods, and the latencies of those with
    room.

    Pods that arrived less than a user's patience before the end are excluded.
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


def _times(lives: Iterable[PodHistory]) -> list[float]:
    return [life.running - life.created for life in lives if life.running is not None]


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles in seconds."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    ranks = {
        f"p{rank}": ordered[min(len(ordered) * rank // 100, len(ordered) - 1)]
        for rank in (50, 90, 99)
    }
    return {**ranks, "most": ordered[-1]}
