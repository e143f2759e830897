"""Kept tables belong to one model and one state: what looks alike does not share them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from slicewise import Geometry, Profile
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Budget
from slicewise.core.states import GpuState, StateSpace, empty_state, state_space
from slicewise.core.tables import drop_tables
from slicewise.engine.explain import open_places as open_places_in
from slicewise.engine.on_node import most_of
from slicewise.engine.room import room_of
from slicewise.policies.least_lost import open_places, stranded_slices
from slicewise.policies.peers.volcano import templates


def model(*starts: int) -> Geometry:
    """A model of always the same name, whose larger profile may start at these slices."""
    small = Profile("1g", size=1, compute=1, memory_gb=5, starts=(0, 1))
    large = Profile("2g", 2, 2, memory_gb=10, starts=starts, uses={"engines": 1})
    budgets = (Budget("engines", 2),)
    return Geometry("tiny", slices=4, compute=4, profiles=(small, large), budgets=budgets)


def tables(space: StateSpace) -> object:
    return space.after_place, space.after_release


@pytest.mark.parametrize(
    "read",
    [
        open_places,
        stranded_slices,
        templates,
        *(partial(score_table, reading=reading) for reading in Reading),
        lambda geometry: tables(state_space(geometry)),
        lambda geometry: room_of(empty_state(geometry)),
        lambda geometry: open_places_in(empty_state(geometry)),
        lambda geometry: most_of(empty_state(geometry), geometry.plain_profiles[1:]),
    ],
)
def test_models_of_one_name_have_tables_of_their_own(read: Callable[[Geometry], object]) -> None:
    """Nodes may have such models: an agent reports what its driver tells it."""
    wide, narrow = model(0, 2), model(0)
    drop_tables()
    alone = read(narrow)
    drop_tables()
    assert read(wide) != alone
    assert read(narrow) == alone


def test_states_of_one_mask_are_judged_by_their_budgets() -> None:
    geometry = model(0, 2)
    small, large = geometry.profiles
    free = empty_state(geometry)
    spent = GpuState(geometry, free.mask, (0, 2))
    assert [room_of(state) for state in (free, spent)] == [2 * 1 + 2 * 2, 2 * 1]
    assert [open_places_in(state) for state in (free, spent)] == [4, 2]
    assert [most_of(state, (large,)) for state in (free, spent)] == [2, 0]
    assert [most_of(state, (small, large)) for state in (free, spent)] == [3, 2]
