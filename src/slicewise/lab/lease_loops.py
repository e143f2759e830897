"""The compiled form of `lease-aware`: the decision, and the inner loop of experiments with leases.

The readable twins are `policies.lease_times` and `engine_loop`. Costs are the same whole numbers;
only the times of windows are computed for each decision, because slots are whole numbers
and the chance that an instance is gone by then is a look-up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from slicewise.core.geometry import MAX_SLICES
from slicewise.lab.compiled_loops import Departures
from slicewise.lab.kernel import (
    ACTIVE,
    FRAGMENTATION,
    NONE,
    OCCUPIED,
    Gpus,
    Ints,
    SmallInts,
    Tables,
    Words,
    following,
    move,
)
from slicewise.lab.packed_tables import Models
from slicewise.policies.lease_aware import LeaseAware
from slicewise.policies.lease_times import NEVER, TIMES, gone_by
from slicewise.policies.ranking import build_row

Floats = npt.NDArray[np.float64]


class LeaseTables(NamedTuple):
    """The constants of a policy beyond those of its ranks."""

    model_of: SmallInts
    """By state: its model's number."""
    windows: SmallInts
    """Model by window: the window's mask, or 0 beyond the last."""
    placed: SmallInts
    """Model by placement: its window."""
    columns: SmallInts
    """Kind by model by column: the placement, or -1 beyond the last."""
    touched: Ints
    """Kind by model by column by window: the window's value where the placement touches it."""
    fixed: Ints
    """Kind by state by column: the part of the cost that no end changes, or NEVER."""
    last: Ints
    """By state: what is added where the end of the new instance is not known."""
    same_waste: SmallInts
    """By rank: the first rank that wastes more."""
    gone: Floats
    """By number of slots: the chance that an instance of unknown end is gone by then."""
    bounds: Ints
    """How many GPUs are compared, of a state and in all."""


class Ends(NamedTuple):
    """The instances on each GPU, by their lowest slice."""

    window: SmallInts
    """GPU by slice: the window of the instance that begins there, or 0."""
    end: Ints
    """GPU by slice: the slot in which it is said to end, or -1 if nothing was said."""


def new_ends(gpus: int, slices: int = MAX_SLICES) -> Ends:
    """Return GPUs of so many slices, without instances."""
    shape = gpus, slices
    return Ends(np.zeros(shape, np.int32), np.zeros(shape, np.int64))


def compile_leases(models: Models, policy: LeaseAware) -> LeaseTables:
    """Return the tables of a policy, without the times: `with_times` adds them."""
    geometries = [space.geometry for space in models.spaces]
    rows = [build_row(policy, models.states, request) for request in models.requests]
    timed = [row.timed for row in rows if row.timed is not None]
    width = max(row.fixed.shape[1] for row in timed)
    windows = np.zeros((len(geometries), max(len(g.windows) for g in geometries)), np.int32)
    placed = np.zeros((len(geometries), max(len(g.placements) for g in geometries)), np.int32)
    columns = np.full((len(timed), len(geometries), width), -1, np.int32)
    touched = np.zeros((*columns.shape, windows.shape[1]), np.int64)
    fixed = np.full((len(timed), len(models.states), width), NEVER, np.int64)
    for at, geometry in enumerate(geometries):
        windows[at, : len(geometry.windows)] = geometry.windows
        placed[at, : len(geometry.placements)] = [p.window for p in geometry.placements]
    for kind, row in enumerate(timed):
        fixed[kind, :, : row.fixed.shape[1]] = row.fixed
        for at, model in enumerate(row.models):
            columns[kind, at, : len(model.placements)] = [p.number for p in model.placements]
            touched[kind, at, : len(model.placements), : len(model.touched)] = model.touched.T
    base = np.cumsum([0] + [len(row.keys) for row in rows])
    return LeaseTables(
        timed[0].model_of.astype(np.int32),
        windows,
        placed,
        columns,
        touched,
        fixed,
        timed[0].last,
        np.concatenate(
            [at + np.array(row.same_waste, np.int32) for at, row in zip(base, timed, strict=False)]
        ).astype(np.int32),
        np.zeros(1),
        np.array([policy.per_state, policy.most], np.int64),
    )


def with_times(leases: LeaseTables, mean_lifetime: float, longest: int) -> LeaseTables:
    """Return the tables for lifetimes of this mean; ``longest`` is the longest to be told apart."""
    return leases._replace(gone=gone_by(np.arange(longest + 1, dtype=np.float64), mean_lifetime))


_inner = njit(cache=True, nogil=True)


@_inner
def _window_times(
    windows: SmallInts,
    held: SmallInts,
    ends: Ints,
    gone: Floats,
    now: int,
    stay: float,
    times: Ints,
    unknown: Ints,
) -> None:
    """Work out how long each window of a GPU is shut for longer, in TIMES."""
    times[:] = now
    unknown[:] = 0
    for s in range(held.size):
        taken = held[s]
        if taken == 0:
            continue
        end = ends[s]
        if end > now:
            for w in range(windows.size):
                if taken & windows[w] and end > times[w]:
                    times[w] = end
        else:
            for w in range(windows.size):
                if taken & windows[w]:
                    unknown[w] += 1
    for w in range(windows.size):
        before = gone[min(times[w] - now, gone.size - 1)]
        lost = stay - before
        if unknown[w]:
            lost_then, lost_before = stay, before
            for _ in range(unknown[w]):
                lost_then *= stay
                lost_before *= before
            lost = (lost_then - lost_before) / (unknown[w] + 1)
        times[w] = np.int64(np.rint(lost * TIMES)) if lost > 0 else 0


@_inner
def choose(
    row_at: SmallInts,
    rank_at: SmallInts,
    row_states: SmallInts,
    bits: Words,
    levels: Ints,
    first: SmallInts,
    leases: LeaseTables,
    ends: Ends,
    kind: int,
    now: int,
    end: int,
) -> tuple[int, int, int]:
    """Return the cheapest GPU and placement, or NONE; and how many GPUs were compared.

    ``end`` is the slot in which the instance is said to end; nothing is known if that is not later.
    """
    model_of, windows, _, columns, touched, fixed, last, same_waste, gone, bounds = leases
    held, held_until = ends
    known = end > now
    stay = gone[min(end - now, gone.size - 1)] if known else 1.0
    times = np.empty(windows.shape[1], np.int64)
    unknown = np.empty(windows.shape[1], np.int64)
    best, best_gpu, best_placement = np.int64(NEVER), NONE, -1
    compared = 0
    rank, stop = row_at[kind], row_at[kind + 1]
    while rank < stop:
        begin = -1
        while True:
            # The states of this rank, in the order of their lowest GPUs.
            state, gpu = -1, NONE
            for i in range(rank_at[rank], rank_at[rank + 1]):
                lowest = first[row_states[i]]
                if begin < lowest < gpu:
                    state, gpu = row_states[i], lowest
            if state < 0:
                break
            begin = gpu
            stop = same_waste[rank]
            model = model_of[state]
            its_windows, its_touched = windows[model], touched[kind, model]
            for _ in range(bounds[0]):
                _window_times(
                    its_windows,
                    held[gpu],
                    held_until[gpu],
                    gone,
                    now,
                    stay,
                    times,
                    unknown,
                )
                for column in range(columns.shape[2]):
                    cost = fixed[kind, state, column]
                    if cost == NEVER:
                        continue
                    if not known:
                        cost += last[state]
                    for w in range(times.size):
                        cost += its_touched[column, w] * times[w]
                    if cost < best or (cost == best and gpu < best_gpu):
                        best, best_gpu = cost, gpu
                        best_placement = columns[kind, model, column]
                compared += 1
                if compared == bounds[1]:
                    return best_gpu, best_placement, compared
                gpu = following(bits, levels, state, gpu + 1)
                if gpu == NONE:
                    break
        rank += 1
    return best_gpu, best_placement, compared


@_inner
def _lowest_slice(window: int) -> int:
    slice_ = 0
    while not window >> slice_ & 1:
        slice_ += 1
    return slice_


@njit(cache=True, nogil=True)
def submit(
    tables: Tables, gpus: Gpus, leases: LeaseTables, ends: Ends, kind: int, now: int, end: int
) -> tuple[int, int, int]:
    """Place a request; return the GPU and the placement, or NONE and -1, and the GPUs compared."""
    after_place, _, weights, row_at, rank_at, row_states, _, _ = tables
    state_of, bits, levels, first, totals = gpus
    gpu, placement, compared = choose(
        row_at, rank_at, row_states, bits, levels, first, leases, ends, kind, now, end
    )
    if gpu != NONE:
        state = state_of[gpu]
        window = leases.placed[leases.model_of[state], placement]
        ends.window[gpu, _lowest_slice(window)] = window
        ends.end[gpu, _lowest_slice(window)] = end
        new = after_place[state, placement]
        move(bits, levels, first, state_of, weights, totals, gpu, new)
    return gpu, placement, compared


@njit(cache=True, nogil=True)
def release(
    tables: Tables, gpus: Gpus, leases: LeaseTables, ends: Ends, gpu: int, placement: int
) -> None:
    """Release an instance."""
    state_of, bits, levels, first, totals = gpus
    state = state_of[gpu]
    if state < 0:
        state = ~state
    window = leases.placed[leases.model_of[state], placement]
    ends.window[gpu, _lowest_slice(window)] = 0
    new = tables.after_release[state, placement]
    move(bits, levels, first, state_of, tables.weights, totals, gpu, new)


@njit(cache=True, nogil=True)
def advance(
    tables: Tables,
    gpus: Gpus,
    leases: LeaseTables,
    ends: Ends,
    departures: Departures,
    kinds: Ints,
    lifetimes: Ints,
    stated: Ints,
    begin: int,
    trace: SmallInts,
) -> None:
    """Run the slots from ``begin``, one per arrival, and fill in the trace.

    ``stated`` is the lifetime that was said with each request, or 0; the instance ends after its
    own. What the trace counts as states examined are the GPUs that were compared.
    """
    instances, ending = departures
    ring = ending.size
    for i in range(kinds.size):
        now = begin + i
        at = now % ring
        instance = ending[at]
        ending[at] = -1
        while instance >= 0:
            release(tables, gpus, leases, ends, instances[instance, 0], instances[instance, 1])
            instance = instances[instance, 2]
        end = now + stated[i] if stated[i] else -1
        gpu, placement, compared = submit(tables, gpus, leases, ends, kinds[i], now, end)
        if gpu != NONE:
            leaves = (at + lifetimes[i]) % ring
            instances[at, 0] = gpu
            instances[at, 1] = placement
            instances[at, 2] = ending[leaves]
            ending[leaves] = at
        trace[i, 0] = gpu != NONE
        trace[i, 1] = compared
        trace[i, 2] = gpus.totals[OCCUPIED]
        trace[i, 3] = gpus.totals[ACTIVE]
        trace[i, 4] = gpus.totals[FRAGMENTATION]
