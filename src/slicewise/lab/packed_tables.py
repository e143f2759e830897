"""Packs a policy and GPU models into the arrays that the compiled kernel reads.

The numbers come from the engine's state spaces and policy rows: legality and preference are
computed in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from slicewise.core.geometry import Geometry
from slicewise.core.request import Request
from slicewise.core.states import ILLEGAL, StateSpace, state_space
from slicewise.lab.measure import Measure
from slicewise.lab.workload import SmallInts
from slicewise.policies.base import TablePolicy, Ties
from slicewise.policies.ranking import RANK_SHIFT, build_row

if TYPE_CHECKING:
    from slicewise.lab.kernel import Tables


class Models:
    """The states of several GPU models, numbered together, for the profiles of some requests."""

    def __init__(self, geometries: Sequence[Geometry], requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.spaces: list[StateSpace] = []
        self.empty_state: list[int] = []
        count = 0
        for geometry in geometries:
            names = frozenset(
                profile.name for request in requests for _, profile in request.candidates(geometry)
            )
            space = state_space(geometry, names)
            self.spaces.append(space)
            self.empty_state.append(count)
            count += len(space)
        self.states = [state for space in self.spaces for state in space.states]

    @cached_property
    def transitions(self) -> tuple[SmallInts, SmallInts]:
        """State by placement: the states after it is made, and after it has ended."""
        return (
            _transitions(self, [space.after_place for space in self.spaces]),
            _transitions(self, [space.after_release for space in self.spaces]),
        )


def compile_tables(
    models: Models, policy: TablePolicy, measure: Measure = Measure.MEMORY
) -> Tables:
    """Return the kernel's tables for one policy."""
    from slicewise.lab.kernel import Tables

    rows = [build_row(policy, models.states, request) for request in models.requests]
    sizes = [np.bincount(row.ranks >> RANK_SHIFT, minlength=len(row.keys)) for row in rows]
    after_place, after_release = models.transitions
    return Tables(
        after_place=after_place,
        after_release=after_release,
        weights=np.array(measure.weights(models.states), np.int32),
        row_at=np.cumsum([0] + [len(row.keys) for row in rows], dtype=np.int32),
        rank_at=np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int32),
        row_states=np.concatenate([row.states for row in rows]).astype(np.int32),
        choice=np.array([row.placement for row in rows], np.int32),
        rotates=policy.ties is Ties.ROTATE,
    )


def _transitions(models: Models, tables: Sequence[tuple[tuple[int, ...], ...]]) -> SmallInts:
    width = max(len(table[0]) for table in tables)
    packed = np.full((len(models.states), width), ILLEGAL, np.int32)
    for base, table in zip(models.empty_state, tables, strict=True):
        part = np.array(table, np.int32)
        part[part != ILLEGAL] += base
        packed[base : base + len(table), : part.shape[1]] = part
    return packed
