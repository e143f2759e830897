"""Rehearsals: candidate tables simulated on the demand as it was seen.

A rehearsal draws requests from the estimated mix, with lifetimes that were seen, on a cluster like
the one in use but of at most `MOST_GPUS` GPUs of each model, at the same load. All candidates get
the same arrivals. A few runs find the candidates that are worth more runs; these have arrivals of
their own, so that a candidate is not chosen for its luck. The rule is `engine.rehearsal.winner`.

Requests that are not placed count as rejected, also where they would wait in a queue.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from slicewise.core.geometry import Geometry
from slicewise.core.request import Request
from slicewise.engine.demand import DemandEstimate
from slicewise.engine.rehearsal import Finding, Interval, Rehearsal, Standing, winner
from slicewise.lab.packed_tables import Models, compile_tables
from slicewise.lab.statistics import Estimate, Floats, Ratio
from slicewise.lab.workload import Arrivals, Ints, SmallInts
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.least_lost_time import LeastLostTime
from slicewise.policies.rehearsed import (
    DEFAULT_CHOICE,
    Choice,
    forms_for,
    table_for,
)

if TYPE_CHECKING:
    from slicewise.lab.kernel import Tables
    from slicewise.lab.lease_loops import LeaseTables
    from slicewise.lab.rehearsal_loop import Table

Cluster = tuple[tuple[Geometry, int], ...]
"""GPU models and how many of each, in the order of their ids."""

MOST_GPUS = 100
"""The GPUs of one model that are simulated."""

MOST_LOAD = 4.0
"""A higher load is simulated as this one: nearly all is rejected under every table, and a flood of
requests must not make rehearsals long."""

WARMUP = 4.0
MEASURED = 25.0
"""The parts of a run, in mean lifetimes."""

LEAST_SLOTS = 4000
"""A run of fewer requests than that says little."""

SCREENING = 12
"""Runs of every candidate."""

FINALS = 40
"""Further runs of the best, of least-lost and of the choice in force."""

FINALISTS = 3

LEASE_RUNS = 12
"""Runs of tables with leases, which take far longer; what leases are worth is soon seen."""

LEAST_STATED = 0.05
"""Tables with leases are candidates if something is said of so many lifetimes."""


@dataclass(frozen=True)
class Scene:
    """A demand on a cluster, in slots: one request arrives in each."""

    gpus: Cluster
    requests: tuple[Request, ...]
    shares: Floats
    sizes: Ints
    """By request: the memory slices that it takes at least."""
    lifetimes: tuple[Ints, ...]
    """By request: the lifetimes that were seen."""
    stated: tuple[Ints, ...]
    """By request: what was said of each of these lifetimes, or 0."""
    load: float
    """Offered slices, as a share of the cluster."""

    @property
    def running(self) -> float:
        """How many instances would run on average if none were rejected."""
        means = np.array([each.mean() for each in self.lifetimes])
        return float(self.shares @ means)

    @property
    def stated_share(self) -> float:
        """The share of requests of whose lifetime something was said."""
        return float(self.shares @ np.array([(each > 0).mean() for each in self.stated]))

    @property
    def warmup(self) -> int:
        """Slots that are not measured."""
        return round(WARMUP * self.running)

    @property
    def slots(self) -> int:
        """All slots of a run, without those in which the cluster is filled."""
        return max(self.warmup + round(MEASURED * self.running), LEAST_SLOTS)

    def draw(self, rng: np.random.Generator) -> tuple[Arrivals, int]:
        """Return the arrivals of a run, and from which slot on they are measured.

        It begins with what would run already: instances drawn by their lifetimes, of which a part
        is over. So it need not wait for the longest lifetimes.
        """
        slots = self.slots
        weights = self.shares * np.array([each.mean() for each in self.lifetimes])
        there = max(1, round(float(weights.sum())))
        kinds = np.concatenate(
            [
                rng.choice(len(self.shares), there, p=weights / weights.sum()),
                rng.choice(len(self.shares), slots, p=self.shares),
            ]
        ).astype(np.int64)
        lifetimes, stated = np.empty((2, len(kinds)), np.int64)
        begun = np.arange(len(kinds)) < there
        for kind, seen in enumerate(self.lifetimes):
            new, old = (kinds == kind) & ~begun, (kinds == kind) & begun
            said = self.stated[kind]
            which = rng.integers(len(seen), size=np.count_nonzero(new))
            lifetimes[new], stated[new] = seen[which], said[which]
            which = rng.choice(len(seen), np.count_nonzero(old), p=seen / seen.sum())
            over = np.floor(seen[which] * rng.random(len(which))).astype(np.int64)
            lifetimes[old], stated[old] = seen[which] - over, np.maximum(0, said[which] - over)
        waiting = np.arange(there, 0, -1)  # they are there when the last one is
        lifetimes[:there] += waiting
        stated[:there] += np.where(stated[:there] > 0, waiting, 0)
        np.clip(lifetimes, 1, len(kinds), out=lifetimes)
        return Arrivals(kinds, lifetimes, stated), there + self.warmup


def scene_of(demand: DemandEstimate, cluster: Cluster) -> Scene | None:
    """Return the scene for a demand on a cluster, made smaller; None if too little is known."""
    largest = max((count for _, count in cluster), default=0)
    if not largest or not demand.running:
        return None
    part = min(1.0, MOST_GPUS / largest)
    gpus = tuple((geometry, max(1, round(count * part))) for geometry, count in cluster if count)
    slices = sum(geometry.slices * count for geometry, count in cluster)
    smaller = sum(geometry.slices * count for geometry, count in gpus) / slices
    shares = {
        request: share
        for request, share in demand.shares.items()
        if any(request.candidates(geometry) for geometry, _ in gpus)
    }
    if not shares or not sum(shares.values()):
        return None
    in_slots, said = [], []
    sizes = []
    for request in shares:
        offered = [p for g, _ in gpus for _, p in request.candidates(g)]
        stays = demand.stays_of({profile.name for profile in offered})
        in_slots.append(np.array([stay.lifetime for stay in stays]) * demand.rate * smaller)
        said.append(np.array([stay.stated or 0.0 for stay in stays]) * demand.rate * smaller)
        sizes.append(min(profile.size for profile in offered))
    weights = np.array(list(shares.values()))
    weights /= weights.sum()
    concurrent = weights * np.array([each.mean() for each in in_slots])
    load = float(concurrent @ np.array(sizes)) / (slices * smaller)
    slower = min(1.0, MOST_LOAD / load) if load else 1.0
    lifetimes, stated = (
        tuple(
            np.where(each > 0, np.maximum(least, np.rint(each * slower)), least).astype(np.int64)
            for each in slots
        )
        for slots, least in ((in_slots, 1), (said, 0))
    )
    return Scene(gpus, tuple(shares), weights, np.array(sizes), lifetimes, stated, load)


@lru_cache(16)
def _models(geometries: tuple[Geometry, ...], requests: tuple[Request, ...]) -> Models:
    return Models(geometries, requests)


@lru_cache(128)
def tables_for(
    geometries: tuple[Geometry, ...], requests: tuple[Request, ...], choice: Choice
) -> Tables:
    """Return the tables of a choice for the kernel; requests are numbered in this order."""
    return compile_tables(_models(geometries, requests), table_for(choice))


@lru_cache(128)
def _table(
    geometries: tuple[Geometry, ...], requests: tuple[Request, ...], choice: Choice
) -> Table:
    from slicewise.lab import rehearsal_loop

    return rehearsal_loop.table(_models(geometries, requests), table_for(choice), requests)


@lru_cache(32)
def lease_tables_for(
    geometries: tuple[Geometry, ...], requests: tuple[Request, ...], base: LeastLostTime
) -> LeaseTables:
    """Return the tables of a choice with leases, without the times."""
    from slicewise.lab import lease_loops

    return lease_loops.compile_leases(_models(geometries, requests), LeaseAware(base))


class Sums(NamedTuple):
    """What one run of a candidate counted."""

    arrivals: int
    rejected: int
    slices: int
    rejected_slices: int


def simulate(scene: Scene, choice: Choice, arrivals: Arrivals, settled: int) -> Sums:
    """Run a candidate on some arrivals; those before ``settled`` are not counted."""
    geometries = tuple(geometry for geometry, _ in scene.gpus)
    empty = _models(geometries, scene.requests).empty_state
    states = np.repeat(np.array(empty, np.int32), [count for _, count in scene.gpus])
    run = _run_with_leases if choice.leases else _run_table
    rejected = run(scene, geometries, choice, states, arrivals)[settled:]
    sizes = scene.sizes[arrivals.kinds[settled:]]
    return Sums(len(rejected), int(rejected.sum()), int(sizes.sum()), int(sizes[rejected].sum()))


def _run_table(
    scene: Scene,
    geometries: tuple[Geometry, ...],
    choice: Choice,
    states: SmallInts,
    arrivals: Arrivals,
) -> npt.NDArray[np.bool_]:
    from slicewise.lab import rehearsal_loop

    table = _table(geometries, scene.requests, choice)
    marks = np.zeros(len(arrivals.kinds), np.int32)
    rehearsal_loop.run(table, states, arrivals.kinds, arrivals.lifetimes, marks)
    rejected: npt.NDArray[np.bool_] = marks == 1
    return rejected


def _run_with_leases(
    scene: Scene,
    geometries: tuple[Geometry, ...],
    choice: Choice,
    states: SmallInts,
    arrivals: Arrivals,
) -> npt.NDArray[np.bool_]:
    from slicewise.lab import compiled_loops, kernel, lease_loops

    policy = table_for(choice)
    assert isinstance(policy, LeaseAware)
    bare = replace(choice, leases=False, mean_lifetime=0.0)
    tables = tables_for(geometries, scene.requests, bare)
    longest = len(arrivals.kinds)
    leases = lease_loops.with_times(
        lease_tables_for(geometries, scene.requests, policy.base), scene.running, longest
    )
    gpus = kernel.new_gpus(states.astype(np.int64), len(leases.model_of))
    departures = compiled_loops.new_departures(longest)
    trace = np.zeros((longest, 5), np.int32)
    kinds, lifetimes, stated = arrivals
    assert stated is not None
    lease_loops.advance(
        tables,
        gpus,
        leases,
        lease_loops.new_ends(len(states)),
        departures,
        kinds,
        lifetimes,
        stated,
        0,
        trace,
    )
    rejected: npt.NDArray[np.bool_] = trace[:, 0] == 0
    return rejected


def rehearse(
    demand: DemandEstimate, cluster: Cluster, in_force: Choice = DEFAULT_CHOICE
) -> Rehearsal | None:
    """Rehearse the candidates for a demand; None if too little is known of it.

    The same estimate, cluster and choice give the same result.
    """
    scene = scene_of(demand, cluster)
    if scene is None:
        return None
    geometries = [geometry for geometry, _ in cluster]
    candidates = forms_for(dict.fromkeys(demand.asked_for, 0.0) | demand.shares, geometries)
    data = demand.data()
    seed = zlib.crc32(repr((data.requests, data.windows)).encode())
    samples: dict[Choice, list[Sums]] = {choice: [] for choice in candidates}
    _run(scene, samples, candidates, seed, range(SCREENING))
    found = _findings(samples, in_force)
    last = _finalists(found, in_force)
    if len(last) > 1:
        finals: dict[Choice, list[Sums]] = {choice: [] for choice in last}
        _run(scene, finals, last, seed, range(SCREENING, SCREENING + FINALS))
        found = [*_findings(finals, in_force), *(f for f in found if f.choice not in finals)]
        found.sort(key=lambda finding: candidates.index(finding.choice))
    best, why = winner([each for each in found if each.choice in last], in_force)
    known = _with_leases(scene, found, best.choice, demand.mean_lifetime)
    if known:
        both: dict[Choice, list[Sums]] = {choice: [] for choice in (*last, *known)}
        _run(scene, both, list(both), seed, range(SCREENING, SCREENING + LEASE_RUNS))
        timed = _findings(both, in_force)
        with_leases, reason = winner(timed, in_force)
        if with_leases.choice.leases:
            best, why = with_leases, reason
        found += timed[len(last) :]
    standing = Standing(best.choice, demand.requests, demand.changes, rehearsed=True)
    return Rehearsal(standing, why, scene.load, tuple(found))


def _with_leases(
    scene: Scene, found: Sequence[Finding], best: Choice, mean_lifetime: float
) -> list[Choice]:
    """Return the better tables with leases, if enough is said of lifetimes."""
    if scene.stated_share < LEAST_STATED:
        return []
    forms = [best.form, "time"] if best.form.startswith("time") else ["time"]
    return [
        replace(finding.choice, leases=True, mean_lifetime=mean_lifetime)
        for finding in found
        if finding.choice.form in forms
    ]


def _run(
    scene: Scene,
    samples: dict[Choice, list[Sums]],
    candidates: Sequence[Choice],
    seed: int,
    runs: range,
) -> None:
    for run in runs:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(run,))))
        arrivals, settled = scene.draw(rng)
        for choice in candidates:
            samples[choice].append(simulate(scene, choice, arrivals, settled))


def _finalists(found: Sequence[Finding], in_force: Choice) -> list[Choice]:
    """Return `least-lost`, the best of those that may be better, and the choice in force."""
    hopeful = [f for f in found[1:] if f.fewer_requests.high > 0 and f.fewer_slices.high >= 0]
    hopeful.sort(key=lambda finding: -finding.fewer_requests.value)
    chosen = {finding.choice for finding in hopeful[:FINALISTS]}
    chosen |= {finding.choice for finding in hopeful if finding.choice.name == in_force.name}
    return [f.choice for f in found if f is found[0] or f.choice in chosen]


def _findings(samples: dict[Choice, list[Sums]], in_force: Choice) -> list[Finding]:
    ratios = {}
    for choice, sums in samples.items():
        arrivals, rejected, slices, rejected_slices = np.array(sums, np.float64).T
        ratios[choice] = Ratio(rejected, arrivals), Ratio(rejected_slices, slices)
    safe = next(iter(ratios.values()))
    used = next((r for choice, r in ratios.items() if choice.name == in_force.name), safe)
    return [
        Finding(
            choice,
            len(samples[choice]),
            _interval(requests.estimate()),
            _interval(slices.estimate()),
            _interval(safe[0].minus(requests)),
            _interval(safe[1].minus(slices)),
            _interval(used[0].minus(requests)),
        )
        for choice, (requests, slices) in ratios.items()
    ]


def _interval(estimate: Estimate) -> Interval:
    return Interval(estimate.value, estimate.low, estimate.high)
