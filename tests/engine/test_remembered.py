"""What is worked out once and remembered is what it would be if it were worked out again."""

from __future__ import annotations

import pytest

from slicewise import Geometry, load_geometry
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.states import state_space
from slicewise.engine.explain import open_places as open_places_in
from slicewise.engine.on_node import most_of
from slicewise.engine.room import room_of
from slicewise.policies.least_lost import open_places, stranded_slices
from slicewise.policies.peers.volcano import templates
from slicewise.policies.registry import policy_class, policy_names


@pytest.fixture(params=["A100-80GB", "A30"])
def model(request: pytest.FixtureRequest) -> Geometry:
    return load_geometry(request.param)


def test_of_a_model(model: Geometry) -> None:
    for remembered in (open_places, stranded_slices, templates):
        assert remembered(model) == remembered.__wrapped__(model)
    for reading in Reading:
        assert score_table(model, reading) == score_table.__wrapped__(model, reading)
    known, anew = state_space(model), state_space.__wrapped__(model)
    assert known.states == anew.states
    assert known.after_place == anew.after_place
    assert known.after_release == anew.after_release


def test_of_a_state(model: Geometry) -> None:
    profiles = model.plain_profiles
    for state in state_space(model).states:
        assert room_of(state) == room_of.__wrapped__(state)
        assert open_places_in(state) == open_places_in.__wrapped__(state)
        assert most_of(state, profiles) == most_of.__wrapped__(state, profiles)


def test_of_a_policy() -> None:
    for name in policy_names():
        assert policy_class(name) is policy_class.__wrapped__(name)
