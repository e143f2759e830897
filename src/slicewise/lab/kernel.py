"""The compiled decision: the same tables and tie-breaks as the engine.

`submit` and `release` are the compiled twins of the scheduler's methods; a property test
compares them decision by decision. The ordered set of GPUs in each state is a tree of 64-bit
words: a word of level n+1 has one bit for every word of level n, so the lowest member is found in
a few steps from the top.

Speed depends on memory access: integers are small, and the words of all states for the same 64
GPUs are adjacent, so a GPU that changes state touches one place. The inner functions take arrays
one by one, because numba counts references whenever an array is taken out of a tuple, which would
cost more than the work itself.

Numba is an extra and slow to import: only the laboratory imports this module.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, types, uint64
from numba.extending import intrinsic

Ints = npt.NDArray[np.int64]
SmallInts = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]

NONE = (1 << 31) - 1
"""No GPU: larger than every id."""
PICKED_ONLY = -1
LEFT_OUT = -2
LOOK_AHEAD = 32


class Tables(NamedTuple):
    """The constants of a run: transitions, and the policy's rows."""

    after_place: SmallInts
    after_release: SmallInts
    weights: SmallInts
    """By state: the units in use and F, as `measure` defines them."""
    row_at: SmallInts
    """By kind of request: its first rank; has one more element than there are kinds."""
    rank_at: SmallInts
    """By rank: its first index in ``row_states``; has one more element than there are ranks."""
    row_states: SmallInts
    """The states that each row considers, best rank first."""
    choice: SmallInts
    """Kind by state: the placement to make, PICKED_ONLY or LEFT_OUT."""
    rotates: bool
    """Whether ties go to the next GPU in turn instead of the lowest id."""


class Gpus(NamedTuple):
    """The state of every GPU, and the index over them."""

    state_of: SmallInts
    """By GPU: its state, or the complement of it (negative) if it is not schedulable."""
    bits: Words
    """Word by state: the trees of bitmaps; the last column holds all schedulable GPUs."""
    levels: Ints
    """By level: its first word; has one more element than there are levels."""
    first: SmallInts
    """By state: the lowest member, or NONE."""
    totals: Ints
    """Units in use, active GPUs, sum of F, and the next GPU of a round-robin policy."""


OCCUPIED, ACTIVE, FRAGMENTATION, TURN = range(4)


def new_gpus(empty_states: Ints, states: int) -> Gpus:
    """Return empty, schedulable GPUs, each in its model's empty state."""
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
        np.zeros((levels[-1], states + 1), np.uint64),
        np.array(levels, np.int64),
        np.full(states + 1, NONE, np.int32),
        np.zeros(4, np.int64),
    )
    _enter_all(gpus)
    return gpus


@intrinsic
def _trailing_zeros(typingctx: Any, word: Any) -> Any:
    """Count the zero bits below the lowest set bit, in one machine instruction."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], context.get_constant(types.boolean, 1))

    return types.int64(types.uint64), codegen


_ctz: Any = _trailing_zeros  # an intrinsic is called with another signature

_inner = njit(cache=True, nogil=True)


@_inner
def insert(bits: Words, levels: Ints, first: SmallInts, row: int, gpu: int) -> None:
    """Add a GPU to a row's set."""
    word = gpu
    for level in range(levels.size - 1):
        at = levels[level] + (word >> 6)
        old = bits[at, row]
        bits[at, row] = old | (uint64(1) << uint64(word & 63))
        if old != 0:
            break
        word >>= 6
    if gpu < first[row]:
        first[row] = gpu


@_inner
def erase(bits: Words, levels: Ints, first: SmallInts, row: int, gpu: int) -> None:
    """Remove a member from a row's set."""
    word = gpu
    for level in range(levels.size - 1):
        at = levels[level] + (word >> 6)
        left = bits[at, row] & ~(uint64(1) << uint64(word & 63))
        bits[at, row] = left
        if left != 0:
            break
        word >>= 6
    if gpu == first[row]:
        first[row] = _descend(bits, levels, row, levels.size - 2, 0)


@_inner
def _descend(bits: Words, levels: Ints, row: int, level: int, word: int) -> int:
    """Return the lowest member below a word of some level, or NONE if the word is empty."""
    if bits[levels[level] + word, row] == 0:
        return NONE
    while level >= 0:
        word = (word << 6) + _ctz(bits[levels[level] + word, row])
        level -= 1
    return word


@_inner
def following(bits: Words, levels: Ints, row: int, floor: int) -> int:
    """Return the lowest member of a row that is at least ``floor``, or NONE."""
    word = floor
    for level in range(levels.size - 1):
        at = word >> 6
        if at >= levels[level + 1] - levels[level]:
            return NONE
        above = bits[levels[level] + at, row] >> uint64(word & 63)
        if above != 0:
            found: int = word + _ctz(above)
            return found if level == 0 else _descend(bits, levels, row, level - 1, found)
        word = at + 1
    return NONE


@_inner
def choose_lowest(
    row_at: SmallInts, rank_at: SmallInts, row_states: SmallInts, first: SmallInts, kind: int
) -> tuple[int, int]:
    """Return the GPU of best rank with the lowest id, or NONE; and the states examined.

    Ranks are sorted, best first; the search ends at the first rank with a GPU.
    """
    best = np.int32(NONE)
    examined = 0
    for rank in range(row_at[kind], row_at[kind + 1]):
        for i in range(rank_at[rank], rank_at[rank + 1]):
            best = min(best, first[row_states[i]])
        examined += rank_at[rank + 1] - rank_at[rank]
        if best != NONE:
            break
    return int(best), examined


@_inner
def choose_in_turn(
    row_at: SmallInts,
    rank_at: SmallInts,
    row_states: SmallInts,
    choice: SmallInts,
    state_of: SmallInts,
    bits: Words,
    levels: Ints,
    first: SmallInts,
    totals: Ints,
    kind: int,
) -> tuple[int, int]:
    """Return the GPU of best rank that is next in turn, or NONE; and the states examined."""
    turn = totals[TURN]
    examined = 0
    begin, end = row_at[kind], row_at[kind + 1]
    if end - begin == 1:  # all tie: mostly one of the next few GPUs fits
        gpu = turn
        for _ in range(LOOK_AHEAD):
            gpu = following(bits, levels, first.size - 1, gpu)
            if gpu == NONE:
                break
            examined += 1
            if choice[kind, state_of[gpu]] != LEFT_OUT:
                totals[TURN] = gpu + 1
                return gpu, examined
            gpu += 1
    best = lowest = NONE
    for rank in range(begin, end):
        for i in range(rank_at[rank], rank_at[rank + 1]):
            examined += 1
            state = row_states[i]
            lowest = min(lowest, first[state])
            best = min(best, following(bits, levels, state, turn))
        if lowest != NONE:
            break
    if best == NONE:
        best = lowest
    if best != NONE:
        totals[TURN] = best + 1
    return best, examined


@_inner
def move(
    bits: Words,
    levels: Ints,
    first: SmallInts,
    state_of: SmallInts,
    weights: SmallInts,
    totals: Ints,
    gpu: int,
    new: int,
) -> None:
    """Change the state of a GPU and update index and totals."""
    old = state_of[gpu]
    if old >= 0:
        erase(bits, levels, first, old, gpu)
        insert(bits, levels, first, new, gpu)
        state_of[gpu] = new
    else:
        state_of[gpu] = ~new
        old = ~old
    before, after = weights[old, 0], weights[new, 0]
    totals[OCCUPIED] += after - before
    totals[ACTIVE] += (after > 0) - (before > 0)
    totals[FRAGMENTATION] += weights[new, 1] - weights[old, 1]


@njit(cache=True, nogil=True)
def _enter_all(gpus: Gpus) -> None:
    for gpu in range(gpus.state_of.size):
        insert(gpus.bits, gpus.levels, gpus.first, gpus.first.size - 1, gpu)
        insert(gpus.bits, gpus.levels, gpus.first, gpus.state_of[gpu], gpu)


@njit(cache=True, nogil=True)
def set_schedulable(gpus: Gpus, gpu: int, schedulable: bool) -> None:
    """Exclude a GPU from scheduling, or include it again."""
    state = gpus.state_of[gpu]
    if (state >= 0) == schedulable:
        return
    gpus.state_of[gpu] = ~state
    if schedulable:
        insert(gpus.bits, gpus.levels, gpus.first, gpus.first.size - 1, gpu)
        insert(gpus.bits, gpus.levels, gpus.first, ~state, gpu)
    else:
        erase(gpus.bits, gpus.levels, gpus.first, gpus.first.size - 1, gpu)
        erase(gpus.bits, gpus.levels, gpus.first, state, gpu)


@njit(cache=True, nogil=True)
def submit(tables: Tables, gpus: Gpus, kind: int) -> tuple[int, int, int]:
    """Place a request; return the GPU, the placement or LEFT_OUT, and the states examined."""
    after_place, _, weights, row_at, rank_at, row_states, choice, rotates = tables
    state_of, bits, levels, first, totals = gpus
    if rotates:
        gpu, examined = choose_in_turn(
            row_at, rank_at, row_states, choice, state_of, bits, levels, first, totals, kind
        )
    else:
        gpu, examined = choose_lowest(row_at, rank_at, row_states, first, kind)
    if gpu == NONE:
        return gpu, LEFT_OUT, examined
    state = state_of[gpu]
    placement = choice[kind, state]
    if placement < 0:
        return gpu, LEFT_OUT, examined
    new = after_place[state, placement]
    move(bits, levels, first, state_of, weights, totals, gpu, new)
    return gpu, placement, examined


@njit(cache=True, nogil=True)
def release(tables: Tables, gpus: Gpus, gpu: int, placement: int) -> None:
    """Release an instance."""
    state = gpus.state_of[gpu]
    new = tables.after_release[state if state >= 0 else ~state, placement]
    move(
        gpus.bits,
        gpus.levels,
        gpus.first,
        gpus.state_of,
        tables.weights,
        gpus.totals,
        gpu,
        new,
    )
