"""Cached tables belong to one model and one state, and forgetting a model removes its tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from slicewise import Catalog, Cluster, Geometry, Profile, Rejection, Request
from slicewise.core import tables as tables_module
from slicewise.core.fragmentation import Reading, score_table
from slicewise.core.geometry import Budget
from slicewise.core.states import GpuState, StateSpace, empty_state, state_space
from slicewise.core.tables import drop_tables
from slicewise.engine.explain import open_places as open_places_in
from slicewise.engine.node_plans import most_of
from slicewise.engine.openings import Openings
from slicewise.engine.room import room_of
from slicewise.engine.scheduler import Scheduler
from slicewise.policies.asked_for import open_places, stranded_slices
from slicewise.policies.peers.volcano import templates

CATALOG = Catalog.builtin()
REQUESTS = [Request(name) for name in ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "1g.6gb")]


def model(*starts: int) -> Geometry:
    """Return a model with a fixed name and these starts of its larger profile."""
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
def test_models_of_the_same_name_have_separate_tables(read: Callable[[Geometry], object]) -> None:
    """Agents report the geometry of their GPUs, so such models can occur."""
    wide, narrow = model(0, 2), model(0)
    drop_tables()
    alone = read(narrow)
    drop_tables()
    assert read(wide) != alone
    assert read(narrow) == alone


def test_states_of_the_same_mask_differ_by_their_budgets() -> None:
    geometry = model(0, 2)
    small, large = geometry.profiles
    free = empty_state(geometry)
    spent = GpuState(geometry, free.mask, (0, 2))
    assert [room_of(state) for state in (free, spent)] == [2 * 1 + 2 * 2, 2 * 1]
    assert [open_places_in(state) for state in (free, spent)] == [4, 2]
    assert [most_of(state, (large,)) for state in (free, spent)] == [2, 0]
    assert [most_of(state, (small, large)) for state in (free, spent)] == [3, 2]


@pytest.mark.parametrize("policy", ["default", "mfi", "first-fit", "round-robin"])
def test_a_forgotten_model_does_not_change_decisions(policy: str) -> None:
    rng = random.Random(policy)
    plain, other = (Scheduler(Cluster(), policy) for _ in range(2))
    both = Openings(plain.cluster), Openings(other.cluster)
    gone = CATALOG.find("A30-24GB").require()
    other.cluster.know(gone)
    for scheduler in (plain, other):
        for name in ("A100-80GB", "H100-80GB"):
            scheduler.cluster.add_node(name, CATALOG.find(name).require(), 3)
    active: list[tuple[int, int]] = []
    for step in range(200):
        if step in (40, 120):
            other.cluster.forget(gone)
        if step == 80:
            other.cluster.know(gone)  # at the end, with other numbers than before
        if active and rng.random() < 0.4:
            one, two = active.pop(rng.randrange(len(active)))
            plain.release(one)
            other.release(two)
            continue
        request = rng.choice(REQUESTS)
        here, there = plain.submit(request), other.submit(request)
        found = [openings.of(request, 1, ()) for openings in both]
        assert [(o.gpu, o.placement) for o in found[0]] == [(o.gpu, o.placement) for o in found[1]]
        if isinstance(here, Rejection) or isinstance(there, Rejection):
            assert isinstance(here, Rejection)
            assert isinstance(there, Rejection)
            assert request.want == "1g.6gb" or here.reason == there.reason
        else:
            assert (here.gpu, here.profile, here.start) == (there.gpu, there.profile, there.start)
            active.append((here.id, there.id))


def test_the_tables_of_one_model_are_dropped() -> None:
    wide, narrow = model(0, 2), model(0)
    drop_tables()
    kept, dropped = state_space(wide), state_space(narrow)
    room = [room_of(empty_state(geometry)) for geometry in (wide, narrow)]
    drop_tables(narrow)
    assert state_space(wide) is kept
    assert state_space(narrow) is not dropped
    assert [room_of(empty_state(geometry)) for geometry in (wide, narrow)] == room


def test_the_tables_of_the_first_of_too_many_models_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables_module, "MOST_MODELS", 2)
    drop_tables()
    models = [model(0), model(0, 1), model(0, 2)]
    spaces = [state_space(geometry) for geometry in models]
    assert [state_space(geometry) for geometry in models[1:]] == spaces[1:]
    assert state_space(models[0]) is not spaces[0]


def test_dropped_tables_are_rebuilt() -> None:
    geometry = CATALOG.find("A30-24GB").require()
    before = state_space(geometry)
    assert state_space(geometry) is before
    drop_tables()
    after = state_space(geometry)
    assert after is not before
    assert after.after_place == before.after_place
