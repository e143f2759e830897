"""Lease-aware as its definition reads: every GPU, window by window, in plain Python.

The twin of `lease_times`, and of its compiled form in the laboratory. With no bounds it is the
full scan that the bounded form is measured against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from slicewise.core.geometry import MAX_SLICES, Geometry, Profile
from slicewise.core.request import Request
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.reference import (
    Held,
    ReferenceGpu,
    asked_windows,
    reference_lost_time,
    stranded_slices_of,
)

STEPS = math.lcm(*range(1, MAX_SLICES + 2)) * 64
"""Times are rounded to whole numbers of these, which 1/2 to 1/17 are."""


class Leased(NamedTuple):
    """An instance and when it ends."""

    held: Held
    ends: float


class Spot(NamedTuple):
    """Where a request goes."""

    gpu: int
    profile: str
    start: int


@dataclass(eq=False)
class LeasedGpu:
    """A GPU and what is on it until when."""

    geometry: Geometry
    leases: list[Leased] = field(default_factory=list)
    schedulable: bool = True

    @property
    def bare(self) -> ReferenceGpu:
        """The GPU without the times."""
        held = [lease.held for lease in self.leases]
        return ReferenceGpu(self.geometry, held, self.schedulable)


def lost_time(
    gpu: LeasedGpu, window: set[int], now: float, ends: float, mean_lifetime: float
) -> float:
    """How much longer a window is shut if an instance is in it until ``ends``."""

    def gone_by(time: float) -> float:
        return 1 - math.exp(-time / mean_lifetime)

    inside = [lease.ends for lease in gpu.leases if lease.held.slices & window]
    known = [end for end in inside if now < end < math.inf]
    unknown = len(inside) - len(known)
    free = max(known, default=now)
    lost = gone_by(ends - now) ** (unknown + 1) - gone_by(free - now) ** (unknown + 1)
    return max(0.0, lost / (unknown + 1))


def lease_cost(
    policy: LeaseAware, gpu: LeasedGpu, profile: Profile, start: int, now: float, ends: float
) -> tuple[bool, int]:
    """Whether the GPU is empty and opened last; then the time lost and the slices stranded."""
    geometry, new = gpu.geometry, Held(profile, start).slices
    base = policy.base.on(geometry)
    if ends <= now:
        ends = math.inf
    windows = asked_windows(geometry, base.asked_for)
    weights = dict(base.weights)
    taken = {s for lease in gpu.leases for s in lease.held.slices}
    values: dict[frozenset[int], float] = {}
    for name, window in windows:
        if window & new:
            value = len(window) * weights.get(name, 1)
            values[frozenset(window)] = values.get(frozenset(window), 0.0) + value
    cost = 0
    for slices, value in values.items():
        time = lost_time(gpu, set(slices), now, ends, policy.mean_lifetime)
        cost += round(4096 * value) * round(STEPS * time)
    before = stranded_slices_of(geometry, windows, taken)
    newly = stranded_slices_of(geometry, windows, taken | new) - before
    last = base.spares or any(len(window) == geometry.slices for _, window in windows)
    cost += len(newly) * round(4096 * base.stranding) * STEPS
    return last and not taken and ends == math.inf, cost


def choose(
    policy: LeaseAware,
    gpus: list[LeasedGpu],
    request: Request,
    now: float,
    ends: float,
    bounded: bool = True,
) -> Spot | None:
    """The cheapest placement on the GPUs that are compared; None if there is none."""
    options = [
        (waste, number, order, profile, start)
        for number, gpu in enumerate(gpus)
        if gpu.schedulable
        for order, (waste, profile) in enumerate(request.candidates(gpu.geometry))
        for start in gpu.bare.feasible_starts(profile)
    ]
    if not options:
        return None
    least = min(waste for waste, *_ in options)
    options = [option for option in options if option[0] == least]
    if bounded:
        among = set(_compared(policy, gpus, options))
        options = [option for option in options if option[1] in among]

    def key(option: tuple[Fraction, int, int, Profile, int]) -> tuple[object, ...]:
        _, number, order, profile, start = option
        cost = lease_cost(policy, gpus[number], profile, start, now, ends)
        return cost, number, order, start

    _, number, _, profile, start = min(options, key=key)
    return Spot(number, profile.name, start)


def _compared(
    policy: LeaseAware,
    gpus: list[LeasedGpu],
    options: list[tuple[Fraction, int, int, Profile, int]],
) -> list[int]:
    """Some GPUs of each state, the states that are best without times first."""
    best: dict[int, tuple[bool, Fraction]] = {}
    for _, number, _, profile, start in options:
        base = policy.base.on(gpus[number].geometry)
        key = reference_lost_time(
            gpus[number].bare,
            profile,
            start,
            base.asked_for,
            base.stranding,
            dict(base.weights),
            base.spares,
        )
        best[number] = min(key, best.get(number, key))
    alike: dict[object, list[int]] = {}
    for number in best:
        alike.setdefault(_state(gpus[number]), []).append(number)
    states = sorted(alike.values(), key=lambda members: (best[members[0]], members[0]))
    return [number for members in states for number in members[: policy.per_state]][: policy.most]


def _state(gpu: LeasedGpu) -> object:
    """What tells states apart: the windows, and what is used of the budgets."""
    held = [lease.held for lease in gpu.leases]
    used = [gpu.geometry.needs(one.profile) for one in held]
    windows = sorted((one.start, one.profile.size) for one in held)
    return gpu.geometry.model, tuple(windows), tuple(map(sum, zip(*used, strict=True)))
