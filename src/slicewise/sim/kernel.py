"""The decision compiled: the same tables and tie-breaks as the engine, at machine speed.

`choose`, `put` and `take_out` are the compiled twins of the engine's choice, `Cluster.put` and
`Cluster.release`; a property test holds them equal decision for decision. The ordered set of
GPUs in each state is a tree of 64-bit words: a word of level n+1 has one bit for every word of
level n, so the lowest member is found in a few steps from the top.

Numba is an extra, and importing it takes a moment: only the laboratory imports this module.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, types, uint64
from numba.extending import intrinsic

Ints = npt.NDArray[np.int64]

NONE = 1 << 61
"""Stands for "no GPU", as in the engine."""
PICKED_ONLY = -1
LEFT_OUT = -2
LOOK_AHEAD = 32


class Tables(NamedTuple):
    """What never changes during a run: transitions, and the policy's rows."""

    after_place: Ints
    after_release: Ints
    taken: Ints
    """By state: occupied slices."""
    fragmentation: Ints
    """By state: F (partial)."""
    row_at: Ints
    """By kind of request: where its row begins; one longer than there are kinds."""
    row_states: Ints
    row_ranks: Ints
    choice: Ints
    """Kind by state: the placement to make, PICKED_ONLY or LEFT_OUT."""
    rotates: bool
    """Whether ties go to the next GPU in turn instead of the lowest id."""


class Gpus(NamedTuple):
    """What changes: the state of every GPU, and the index over them."""

    state_of: npt.NDArray[np.int32]
    schedulable: npt.NDArray[np.bool_]
    bits: npt.NDArray[np.uint64]
    """State by word: the tree of bitmaps; the extra last row holds all schedulable GPUs."""
    levels: Ints
    """Where each level's words begin in a row of ``bits``; one longer than there are levels."""
    first: Ints
    """By state: the lowest member, or NONE."""
    totals: Ints
    """Occupied slices, active GPUs, sum of F, where a policy that goes round continues."""


OCCUPIED, ACTIVE, FRAGMENTATION, TURN = range(4)


def new_gpus(empty_states: Ints, states: int) -> Gpus:
    """Empty schedulable GPUs, each in its model's empty state."""
    count = len(empty_states)
    levels = [0]
    words = count
    while True:
        words = -(-words // 64)
        levels.append(levels[-1] + words)
        if words == 1:
            break
    gpus = Gpus(
        empty_states.astype(np.int32),
        np.ones(count, np.bool_),
        np.zeros((states + 1, levels[-1]), np.uint64),
        np.array(levels, np.int64),
        np.full(states + 1, NONE, np.int64),
        np.zeros(4, np.int64),
    )
    _enter_all(gpus)
    return gpus


@intrinsic
def _trailing_zeros(typingctx: Any, word: Any) -> Any:
    """How many zero bits stand below the lowest set one; one machine instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(types.boolean, 1))

    return types.int64(types.uint64), codegen


_ctz: Any = _trailing_zeros  # an intrinsic's own signature is not the one it is called with


@njit(cache=True, nogil=True)
def _insert(gpus: Gpus, row: int, gpu: int) -> None:
    word = gpu
    for level in range(gpus.levels.size - 1):
        at = gpus.levels[level] + (word >> 6)
        old = gpus.bits[row, at]
        gpus.bits[row, at] = old | (uint64(1) << uint64(word & 63))
        if old != 0:
            break
        word >>= 6
    if gpu < gpus.first[row]:
        gpus.first[row] = gpu


@njit(cache=True, nogil=True)
def _erase(gpus: Gpus, row: int, gpu: int) -> None:
    word = gpu
    for level in range(gpus.levels.size - 1):
        at = gpus.levels[level] + (word >> 6)
        left = gpus.bits[row, at] & ~(uint64(1) << uint64(word & 63))
        gpus.bits[row, at] = left
        if left != 0:
            break
        word >>= 6
    if gpu == gpus.first[row]:
        gpus.first[row] = _descend(gpus, row, gpus.levels.size - 2, 0)


@njit(cache=True, nogil=True)
def _descend(gpus: Gpus, row: int, level: int, word: int) -> int:
    """The lowest member below a word of some level; NONE when the word is empty."""
    if gpus.bits[row, gpus.levels[level] + word] == 0:
        return NONE
    while level >= 0:
        bits = gpus.bits[row, gpus.levels[level] + word]
        word = (word << 6) + _ctz(bits)
        level -= 1
    return word


@njit(cache=True, nogil=True)
def _next(gpus: Gpus, row: int, floor: int) -> int:
    """The lowest member that is at least ``floor``, or NONE."""
    word = floor
    for level in range(gpus.levels.size - 1):
        at = word >> 6
        if at >= gpus.levels[level + 1] - gpus.levels[level]:
            return NONE
        bits = gpus.bits[row, gpus.levels[level] + at] >> uint64(word & 63)
        if bits != 0:
            found = word + _ctz(bits)
            return found if level == 0 else _descend(gpus, row, level - 1, found)
        word = at + 1
    return NONE


@njit(cache=True, nogil=True)
def _enter_all(gpus: Gpus) -> None:
    everyone = gpus.bits.shape[0] - 1
    for gpu in range(gpus.state_of.size):
        _insert(gpus, everyone, gpu)
        _insert(gpus, gpus.state_of[gpu], gpu)


@njit(cache=True, nogil=True)
def set_schedulable(gpus: Gpus, gpu: int, schedulable: bool) -> None:
    """Take a GPU out of scheduling, or let it back in."""
    if gpus.schedulable[gpu] == schedulable:
        return
    gpus.schedulable[gpu] = schedulable
    everyone = gpus.bits.shape[0] - 1
    if schedulable:
        _insert(gpus, everyone, gpu)
        _insert(gpus, gpus.state_of[gpu], gpu)
    else:
        _erase(gpus, everyone, gpu)
        _erase(gpus, gpus.state_of[gpu], gpu)


@njit(cache=True, nogil=True)
def choose(tables: Tables, gpus: Gpus, kind: int) -> tuple[int, int]:
    """The GPU the policy picks for a kind of request, or NONE; and how many states were looked at.

    States stand best first; the search ends with the first rank that has a GPU.
    """
    begin, end = tables.row_at[kind], tables.row_at[kind + 1]
    if tables.rotates:
        return _choose_in_turn(tables, gpus, kind, begin, end)
    best = NONE
    rank = -1
    for i in range(begin, end):
        if tables.row_ranks[i] != rank:
            if best < NONE:
                return best, i - begin
            rank = tables.row_ranks[i]
        best = min(best, gpus.first[tables.row_states[i]])
    return best, end - begin


@njit(cache=True, nogil=True)
def _choose_in_turn(tables: Tables, gpus: Gpus, kind: int, begin: int, end: int) -> tuple[int, int]:
    turn = gpus.totals[TURN]
    looked = 0
    if begin < end and tables.row_ranks[begin] == tables.row_ranks[end - 1]:
        everyone = gpus.bits.shape[0] - 1
        gpu = turn
        for _ in range(LOOK_AHEAD):
            gpu = _next(gpus, everyone, gpu)
            if gpu == NONE:
                break
            looked += 1
            if tables.choice[kind, gpus.state_of[gpu]] != LEFT_OUT:
                gpus.totals[TURN] = gpu + 1
                return gpu, looked
            gpu += 1
    following = lowest = NONE
    rank = -1
    for i in range(begin, end):
        if tables.row_ranks[i] != rank:
            if lowest < NONE:
                break
            rank = tables.row_ranks[i]
        looked += 1
        state = tables.row_states[i]
        lowest = min(lowest, gpus.first[state])
        following = min(following, _next(gpus, state, turn))
    best = lowest if following == NONE else following
    if best != NONE:
        gpus.totals[TURN] = best + 1
    return best, looked


@njit(cache=True, nogil=True)
def put(tables: Tables, gpus: Gpus, gpu: int, placement: int) -> None:
    """Create an instance; the placement must be legal there."""
    old = gpus.state_of[gpu]
    _move(tables, gpus, gpu, old, tables.after_place[old, placement])


@njit(cache=True, nogil=True)
def take_out(tables: Tables, gpus: Gpus, gpu: int, placement: int) -> None:
    """End an instance that is there."""
    old = gpus.state_of[gpu]
    _move(tables, gpus, gpu, old, tables.after_release[old, placement])


@njit(cache=True, nogil=True)
def _move(tables: Tables, gpus: Gpus, gpu: int, old: int, new: int) -> None:
    if gpus.schedulable[gpu]:
        _erase(gpus, old, gpu)
        _insert(gpus, new, gpu)
    gpus.state_of[gpu] = new
    before, after = tables.taken[old], tables.taken[new]
    gpus.totals[OCCUPIED] += after - before
    gpus.totals[ACTIVE] += (after > 0) - (before > 0)
    gpus.totals[FRAGMENTATION] += tables.fragmentation[new] - tables.fragmentation[old]


@njit(cache=True, nogil=True)
def arrive(tables: Tables, gpus: Gpus, kind: int) -> tuple[int, int, int]:
    """Decide a request and carry it out: GPU, placement or LEFT_OUT, and states looked at."""
    gpu, looked = choose(tables, gpus, kind)
    if gpu == NONE:
        return gpu, LEFT_OUT, looked
    placement = tables.choice[kind, gpus.state_of[gpu]]
    if placement < 0:
        return gpu, LEFT_OUT, looked
    put(tables, gpus, gpu, placement)
    return gpu, placement, looked
