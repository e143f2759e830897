"""The experiments' inner loop, compiled. Its readable twin is in `by_engine`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from slicewise.sim.kernel import (
    ACTIVE,
    FRAGMENTATION,
    NONE,
    OCCUPIED,
    Gpus,
    Ints,
    SmallInts,
    Tables,
    choose_in_turn,
    choose_lowest,
    move,
)


class Departures(NamedTuple):
    """Who leaves when. One request arrives a slot, so an instance is known by its slot.

    All arrays are rings, one longer than the longest lifetime: when a slot's place comes round
    again, its instance is gone. Instances that leave in the same slot form a chain.
    """

    guests: SmallInts
    """By slot of arrival: GPU, placement, and the next that leaves in the same slot or -1."""
    leaving: SmallInts
    """By slot: the first in the chain of those who leave then, or -1."""


def new_departures(longest: int) -> Departures:
    """No one is there yet."""
    ring = longest + 1
    return Departures(
        np.full((ring, 4), -1, np.int32),  # a fourth column, so that no guest spans cache lines
        np.full(ring, -1, np.int32),
    )


@intrinsic
def _prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Have the processor fetch an element of an array early, counted from its beginning."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, number, number, number])
        insert: Any = cgutils.get_or_insert_function
        function = insert(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, number(1), number(3), number(1)])  # write, keep, data
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


prefetch: Any = _prefetch


@njit(cache=True, nogil=True)
def advance(
    tables: Tables,
    gpus: Gpus,
    departures: Departures,
    kinds: Ints,
    lifetimes: Ints,
    begin: int,
    trace: SmallInts,
) -> None:
    """Go through the slots from ``begin`` on, one for each arrival, and fill in the trace.

    The trace has a row a slot, with the columns of `experiment.TRACE`.
    """
    after_place, after_release, weights, row_at, rank_at, row_states, choice, rotates = tables
    state_of, bits, levels, first, totals = gpus
    guests, leaving = departures
    ring = leaving.size
    at = begin % ring
    for i in range(kinds.size):
        # In a large cluster nearly every departure finds its GPU outside the cache. Who leaves
        # when is known beforehand, so what will be touched is asked for some slots ahead.
        if at + 24 < ring:
            who = leaving[at + 24]
            if who >= 0:
                prefetch(guests, np.int64(who) * 4)
            who = leaving[at + 16]
            if who >= 0:
                prefetch(state_of, np.int64(guests[who, 0]))
            who = leaving[at + 8]
            if who >= 0:
                gpu = guests[who, 0]
                word = np.int64(gpu >> 6) * first.size
                prefetch(bits, word + state_of[gpu])
                prefetch(bits, word + after_release[state_of[gpu], guests[who, 1]])
        if i + 8 < kinds.size:
            prefetch(leaving, (at + 8 + lifetimes[i + 8]) % ring)

        # Terminations first.
        who = leaving[at]
        leaving[at] = -1
        while who >= 0:
            gpu = guests[who, 0]
            new = after_release[state_of[gpu], guests[who, 1]]
            move(bits, levels, first, state_of, weights, totals, gpu, new)
            who = guests[who, 2]

        # Then the arrival.
        kind = kinds[i]
        if rotates:
            gpu, looked = choose_in_turn(
                row_at, rank_at, row_states, choice, state_of, bits, levels, first, totals, kind
            )
        else:
            gpu, looked = choose_lowest(row_at, rank_at, row_states, first, kind)
        placement = -1 if gpu == NONE else choice[kind, state_of[gpu]]
        if placement >= 0:
            new = after_place[state_of[gpu], placement]
            move(bits, levels, first, state_of, weights, totals, gpu, new)
            end = (at + lifetimes[i]) % ring
            guests[at, 0] = gpu
            guests[at, 1] = placement
            guests[at, 2] = leaving[end]
            leaving[end] = at

        trace[i, 0] = placement >= 0
        trace[i, 1] = looked
        trace[i, 2] = totals[OCCUPIED]
        trace[i, 3] = totals[ACTIVE]
        trace[i, 4] = totals[FRAGMENTATION]
        at += 1
        if at == ring:
            at = 0
