"""Forecast the aged cluster of the benchmark by simulation, without Kubernetes.

The model of kube-scheduler: it scores nodes without considering GPUs. Among nodes with a matching
device it takes a random one with the most CPU and memory left, in whole percents, and there the
first device by name. If pods request almost no CPU, all nodes score the same, except that empty
ones come last. slicewise is the engine with its default policy. Pods that cannot be placed are
rejected.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.kube_plan import NODE_CPUS, Arrival, Plan, arrivals, at_once, in_steps

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.request import Rejection
from slicewise.engine.scheduler import Scheduler
from slicewise.lab.mix import Mix
from slicewise.policies.base import TablePolicy
from slicewise.policies.registry import policy

Measured = dict[str, float]
_COLUMNS = ("running", "slices", "scores", "came", "gave_up", "stuck", "stranded")
Placer = Callable[[str], Instance | None]


def forecast(mix: Mix, plan: Plan, nodes: int, gpus: int, side: str) -> dict[str, Measured]:
    """Return the forecast of the measured parts, in the terms of the benchmark."""
    return Model(mix, plan, nodes, gpus, side).run()


class Model:
    """A simulated cluster with arriving and departing pods."""

    def __init__(self, mix: Mix, plan: Plan, nodes: int, gpus: int, side: str) -> None:
        self._mix = mix
        self._plan = plan
        self._nodes = nodes
        self._cluster = Cluster.of(mix.geometry, nodes * gpus, gpus)
        self._stream = arrivals(mix, plan.seed)
        for _ in range(plan.burst):
            next(self._stream)
        self._opened: list[range] = []
        """The GPUs of each schedulable node."""
        self._place = (
            _first_match(self._cluster, mix, plan.cpus, self._opened, random.Random(plan.seed))
            if side == "stock"
            else _engine(self._cluster)
        )
        self._leaving: list[tuple[float, Instance]] = []

    def run(self) -> dict[str, Measured]:
        """Age the nodes wave by wave, then run all of them together."""
        plan, mix, total = self._plan, self._mix, self._cluster.slices
        waves = []
        for wave in plan.waves(self._nodes):
            self._open_only(wave)
            slices = plan.load * total * len(wave) / self._nodes
            others = len(self._leaving)
            self._step(0.0, at_once(self._stream, slices))
            batches = in_steps(self._stream, mix, plan, slices, plan.steps)
            waves.append(self._live(batches, 0, plan.unmeasured))
            waves[-1]["running"] -= others
        aged = {name: sum(wave[name] for wave in waves) for name in waves[0]}
        self._open_only(range(self._nodes))
        steps = plan.steps_together
        batches = in_steps(self._stream, mix, plan, plan.load * total, steps)
        together = self._live(batches, plan.steps, steps // 2)
        return {"aged": self._shares(aged), "together": self._shares(together)}

    def _live(self, batches: Iterable[list[Arrival]], first: int, unmeasured: int) -> Measured:
        """Run the steps and return the samples after the unmeasured ones."""
        gpus = [gpu for node in self._opened for gpu in node]
        scores = score_table(self._mix.geometry, Reading.PARTIAL)
        seen: list[tuple[int, ...]] = []
        for number, batch in enumerate(batches):
            missed = self._step((first + number + 1) * self._plan.step, batch)
            states = [self._cluster.state(gpu) for gpu in gpus]
            free = [state.free_slices for state in states]
            seen.append(
                (
                    len(self._leaving),
                    len(gpus) * self._mix.geometry.slices - sum(free),
                    sum(scores[state.mask] for state in states),
                    len(batch),
                    len(missed),
                    sum(size <= sum(free) for size in missed),
                    sum(size <= max(free) for size in missed),
                )
            )
        columns = list(zip(*seen[unmeasured:], strict=True))
        means = [statistics.fmean(column) for column in columns[:3]]
        sums = [sum(column) for column in columns[3:]]
        return dict(zip(_COLUMNS, (*means, *sums), strict=True))

    def _shares(self, found: Measured) -> Measured:
        return {
            "running": found["running"],
            "slices_share": found["slices"] / self._cluster.slices,
            "fragmentation": found["scores"] / self._cluster.gpus,
            "came": found["came"],
            **{
                f"{name}_share": found[name] / found["came"]
                for name in ("gave_up", "stuck", "stranded")
            },
        }

    def _open_only(self, wave: range) -> None:
        self._opened.clear()
        for number, node in enumerate(self._cluster.nodes):
            if number in wave:
                self._cluster.resume(node.name)
                self._opened.append(node.gpus)
            else:
                self._cluster.drain(node.name)

    def _step(self, now: float, batch: Sequence[Arrival]) -> list[int]:
        """End and place pods; return the sizes of those that cannot be placed."""
        while self._leaving and self._leaving[0][0] <= now:
            self._cluster.release(heapq.heappop(self._leaving)[1])
        missed = []
        for arrival in batch:
            instance = self._place(arrival.profile)
            if instance is None:
                missed.append(arrival.size)
            else:
                heapq.heappush(self._leaving, (now + arrival.lifetime, instance))
        return missed


def _engine(cluster: Cluster) -> Placer:
    scheduler = Scheduler(cluster)

    def place(profile: str) -> Instance | None:
        found = scheduler.submit(profile)
        return None if isinstance(found, Rejection) else found

    return place


def _first_match(
    cluster: Cluster, mix: Mix, cpus: int, opened: Sequence[range], chance: random.Random
) -> Placer:
    first = policy("peer-nvidia-dra")
    assert isinstance(first, TablePolicy)
    starts = {
        profile.name: [
            None if (found := first.prefer(state, profile)) is None else found.start
            for state in cluster.states
        ]
        for profile in mix.profiles
    }
    sizes = {profile.name: profile.size for profile in mix.profiles}

    def score(node: range, size: int) -> int:
        used = sum(mix.geometry.slices - cluster.state(gpu).free_slices for gpu in node)
        return 100 * (NODE_CPUS - cpus * (used + size)) // NODE_CPUS if cpus else min(used, 1)

    def place(profile: str) -> Instance | None:
        found = {
            node: next(
                (gpu, start)
                for gpu in node
                if (start := starts[profile][cluster.state_of[gpu]]) is not None
            )
            for node in opened
            if any(starts[profile][cluster.state_of[gpu]] is not None for gpu in node)
        }
        if not found:
            return None
        best = max(found, key=lambda node: (score(node, sizes[profile]), chance.random()))
        gpu, start = found[best]
        return cluster.place(gpu, profile, start)

    return place
