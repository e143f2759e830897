"""Where ends are known: the cost of every placement on some GPUs, in one vector operation.

The formula is in `lease_aware`. Costs are whole numbers: the time of each window is rounded once,
to a grid that has 1/2 to 1/17, and everything after is exact. So sums do not depend on their
order, costs that are equal tie, and with no end known every cost is that of `least-lost-time`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from slicewise.core.geometry import MAX_SLICES, Geometry, Placement
from slicewise.core.request import Request
from slicewise.core.states import GpuState
from slicewise.core.window_ends import Counts, Floats, Ints
from slicewise.policies.asked_for import asked_profiles, stranded_slices
from slicewise.policies.least_lost_time import LeastLostTime, LostTime

if TYPE_CHECKING:
    from slicewise.core.cluster import Cluster
    from slicewise.policies.lease_aware import LeaseAware

TIMES = math.lcm(*range(1, MAX_SLICES + 2)) * 64
"""The steps of a time from 0 to 1."""

VALUES = 4096
"""The steps of a slice: weights are rounded to this."""

LAST = 1 << 60
"""Added to the cost of an empty GPU that is opened last: more than any cost."""

NEVER = 1 << 61
"""The cost of a placement that is not open, or wastes more than another one would."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What placements of one kind of request cost on one model, apart from the state."""

    placements: tuple[Placement, ...]
    """In the order of the request's profiles, starts ascending."""
    touched: Ints
    """Window by placement: the window's value where the placement touches it, or 0."""


@dataclass(frozen=True, slots=True)
class TimedRow:
    """What the costs of one kind of request need beyond its row."""

    models: tuple[ModelCosts, ...]
    model_of: Ints
    """By state: its model's number in ``models``."""
    fixed: Ints
    """State by placement of its model: the part of the cost that no end changes, or NEVER."""
    last: Ints
    """By state: LAST for an empty GPU that is opened last."""
    same_waste: list[int]
    """By rank: the first rank that wastes more."""


def window_values(policy: LeastLostTime, geometry: Geometry) -> list[int]:
    """By window of the model: what it counts, in VALUES."""
    weights = dict(policy.weights)
    values = dict.fromkeys(geometry.windows, 0.0)
    for profile in asked_profiles(geometry, policy.asked_for):
        for start in profile.starts:
            values[profile.window(start)] += profile.size * weights.get(profile.name, 1)
    return [round(VALUES * value) for value in values.values()]


def model_costs(policy: LeastLostTime, geometry: Geometry, request: Request) -> ModelCosts:
    """The placements of a request on a model, and the windows that they touch."""
    wanted = [profile for _, profile in request.candidates(geometry)]
    placements = tuple(p for profile in wanted for p in geometry.placements if p.profile is profile)
    touched = np.zeros((len(geometry.windows), len(placements)), np.int64)
    for at, (window, value) in enumerate(
        zip(geometry.windows, window_values(policy, geometry), strict=True)
    ):
        for column, placement in enumerate(placements):
            if window & placement.window:
                touched[at, column] = value
    return ModelCosts(placements, touched)


def timed_row(
    policy: LostTime, states: Sequence[GpuState], request: Request, wastes: Sequence[Fraction]
) -> TimedRow:
    """Work out the costs on every state; ``wastes`` is by rank."""
    geometries = list(dict.fromkeys(state.geometry for state in states))
    tables = {geometry: policy.on(geometry) for geometry in geometries}
    models = tuple(model_costs(tables[geometry], geometry, request) for geometry in geometries)
    number = {geometry: at for at, geometry in enumerate(geometries)}
    model_of = [number[state.geometry] for state in states]
    width = max((len(model.placements) for model in models), default=0)
    fixed = np.full((len(states), width), NEVER, np.int64)
    last = np.zeros(len(states), np.int64)
    for at, state in enumerate(states):
        table = tables[state.geometry]
        costs = _fixed_costs(table, state, request)
        fixed[at, : len(costs)] = costs
        if not state.mask and table.opens_empty_last(state.geometry):
            last[at] = LAST
    return TimedRow(
        models,
        np.array(model_of, np.int64),
        fixed,
        last,
        [bisect_right(wastes, waste) for waste in wastes],
    )


def _fixed_costs(policy: LeastLostTime, state: GpuState, request: Request) -> list[int]:
    """What each placement strands; NEVER where it is not open, or an open one wastes less."""
    mask = state.mask
    stranded = stranded_slices(state.geometry, policy.asked_for)
    each = round(VALUES * policy.stranding) * TIMES
    candidates = request.candidates(state.geometry)
    least = min((w for w, profile in candidates if state.feasible_starts(profile)), default=None)
    costs: list[int] = []
    for waste, profile in candidates:
        starts = state.feasible_starts(profile) if waste == least else ()
        for start in profile.starts:
            after = mask | profile.window(start)
            newly = (stranded[after] & ~stranded[mask]).bit_count()
            costs.append(each * newly if start in starts else NEVER)
    return costs


def gone_by(times: Floats, mean_lifetime: float) -> Floats:
    """The chance that an instance of unknown end is gone after a time: y in the formula."""
    gone: Floats = -np.expm1(times / -mean_lifetime)
    return gone


def lost_times(last: Floats, unknown: Counts, stay: float, mean_lifetime: float) -> Ints:
    """By GPU and window: the time that is lost, in TIMES.

    ``last`` is in how long the last known end comes, ``stay`` how long the new instance stays.
    """
    then = gone_by(np.array([stay]), mean_lifetime)
    now = gone_by(np.maximum(last, 0), mean_lifetime)
    if unknown.any():
        count = unknown + 1
        lost = (then**count - now**count) / count
    else:
        lost = then - now
    rounded: Ints = np.rint(np.maximum(lost, 0) * TIMES).astype(np.int64)
    return rounded


def placement_costs(
    policy: LeaseAware,
    row: TimedRow,
    states: Ints,
    ends: tuple[Floats, Counts],
    now: float,
    leaves: float,
) -> Ints:
    """By GPU in these states, and by placement of its model: what it costs, or at least NEVER.

    ``ends`` is by GPU and window, as in `WindowEnds.rows`; the new instance ``leaves`` then.
    """
    last, unknown = ends
    if leaves <= now:
        leaves = math.inf  # like an end that has passed: it says nothing
    times = lost_times(last - now, unknown, leaves - now, policy.mean_lifetime)
    costs: Ints = row.fixed[states]
    models = row.model_of[states]
    for number in set(models.tolist()):
        model, here = row.models[number], models == number
        part = times[here, : len(model.touched)] @ model.touched
        costs[here, : part.shape[1]] += part
    if leaves == math.inf:
        costs += row.last[states, None]
    return costs


def cheapest(
    cluster: Cluster,
    policy: LeaseAware,
    row: TimedRow,
    states: Sequence[int],
    now: float,
    ends: float,
) -> tuple[int, int]:
    """The cheapest placement on GPUs in these states, best states first, as GPU and number."""
    gpus: list[int] = []
    state_of: list[int] = []
    for state in states:
        found = cluster.members[state].lowest(min(policy.per_state, policy.most - len(gpus)))
        gpus += found
        state_of += [state] * len(found)
        if len(gpus) == policy.most:
            break
    ids, of = np.array(gpus), np.array(state_of)
    rows = cluster.window_ends.rows(cluster, ids, now)
    costs = placement_costs(policy, row, of, rows, now, ends)
    lowest = costs.min(axis=1)
    gpu = int(ids[lowest == lowest.min()].min())
    at = gpus.index(gpu)
    return gpu, row.models[row.model_of[of[at]]].placements[costs[at].argmin()].number
