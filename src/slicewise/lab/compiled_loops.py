"""The compiled inner loop of experiments. Its readable twin is `engine_loop`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from slicewise.lab.kernel import (
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
    """When instances end. One request arrives per slot, so a slot identifies an instance.

    All arrays are rings, one longer than the longest lifetime: when an index is reused, its
    instance has ended. Instances that end in the same slot form a linked list.
    """

    instances: SmallInts
    """By slot of arrival: GPU, placement, and the next instance of the list or -1."""
    ending: SmallInts
    """By slot: the first instance that ends in it, or -1."""


def new_departures(longest: int) -> Departures:
    """Return departures without instances."""
    ring = longest + 1
    return Departures(
        np.full((ring, 4), -1, np.int32),  # a fourth column keeps rows inside cache lines
        np.full(ring, -1, np.int32),
    )


@intrinsic
def _prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Prefetch an element of an array, given by its offset, into the processor's cache."""

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
    """Run the slots from ``begin``, one per arrival, and fill in the trace.

    The trace has a row per slot, with the columns of `experiment.TRACE`.
    """
    after_place, after_release, weights, row_at, rank_at, row_states, choice, rotates = tables
    state_of, bits, levels, first, totals = gpus
    instances, ending = departures
    ring = ending.size
    at = begin % ring
    for i in range(kinds.size):
        # In a large cluster the GPU of nearly every departure is outside the cache. Departures
        # are known in advance, so their data is prefetched some slots ahead.
        if at + 24 < ring:
            instance = ending[at + 24]
            if instance >= 0:
                prefetch(instances, np.int64(instance) * 4)
            instance = ending[at + 16]
            if instance >= 0:
                prefetch(state_of, np.int64(instances[instance, 0]))
            instance = ending[at + 8]
            if instance >= 0:
                gpu = instances[instance, 0]
                word = np.int64(gpu >> 6) * first.size
                prefetch(bits, word + state_of[gpu])
                prefetch(bits, word + after_release[state_of[gpu], instances[instance, 1]])
        if i + 8 < kinds.size:
            prefetch(ending, (at + 8 + lifetimes[i + 8]) % ring)

        # Departures first.
        instance = ending[at]
        ending[at] = -1
        while instance >= 0:
            gpu = instances[instance, 0]
            new = after_release[state_of[gpu], instances[instance, 1]]
            move(bits, levels, first, state_of, weights, totals, gpu, new)
            instance = instances[instance, 2]

        # Then the arrival.
        kind = kinds[i]
        if rotates:
            gpu, examined = choose_in_turn(
                row_at, rank_at, row_states, choice, state_of, bits, levels, first, totals, kind
            )
        else:
            gpu, examined = choose_lowest(row_at, rank_at, row_states, first, kind)
        placement = -1 if gpu == NONE else choice[kind, state_of[gpu]]
        if placement >= 0:
            new = after_place[state_of[gpu], placement]
            move(bits, levels, first, state_of, weights, totals, gpu, new)
            end = (at + lifetimes[i]) % ring
            instances[at, 0] = gpu
            instances[at, 1] = placement
            instances[at, 2] = ending[end]
            ending[end] = at

        trace[i, 0] = placement >= 0
        trace[i, 1] = examined
        trace[i, 2] = totals[OCCUPIED]
        trace[i, 3] = totals[ACTIVE]
        trace[i, 4] = totals[FRAGMENTATION]
        at += 1
        if at == ring:
            at = 0
