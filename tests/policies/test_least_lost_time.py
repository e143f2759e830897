"""The policies that know what is asked for, in every state of every distinct model."""

from __future__ import annotations

from fractions import Fraction

import pytest

from slicewise import Catalog, Cluster, Geometry, Scheduler, load_geometry
from slicewise.core.states import GpuState, empty_state, state_space
from slicewise.policies.asked_for import asked_profiles
from slicewise.policies.least_lost import LeastLost
from slicewise.policies.least_lost_time import LeastLostTime
from slicewise.policies.reference import (
    Held,
    ReferenceGpu,
    reference_least_lost,
    reference_lost_time,
)

MODELS = (
    "A100-80GB",
    "A30-24GB",
    "RTX-PRO-6000-Blackwell-96GB",
    "RTX-PRO-6000D-84GB",
    "RTX-PRO-5000",
    "RTX-PRO-4500",
    "Thor-iGPU",
)


def reference(state: GpuState) -> ReferenceGpu:
    """Return a GPU with an instance in each of the state's windows."""
    at = {p.window: Held(p.profile, p.start) for p in state.geometry.placements}
    assert state.windows is not None
    return ReferenceGpu(state.geometry, [at[window] for window in state.windows])


def some_asked(geometry: Geometry) -> frozenset[str]:
    """Return every other profile, variants included."""
    return frozenset(p.name for p in geometry.profiles[1::2])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("some", [False, True])
def test_every_state_costs_what_the_definition_says(model: str, some: bool) -> None:
    geometry = load_geometry(model)
    asked = some_asked(geometry) if some else None
    names = [profile.name for profile in geometry.plain_profiles]
    weights = ((names[0], 0.3), (names[-1], 8.0)) if some else ()
    policy = LeastLostTime(asked, 1.7 if some else 4, weights, spares=some)
    counts = LeastLost(asked)
    seen: set[tuple[tuple[int, ...], int]] = set()
    for state in state_space(geometry).states:
        gpu = reference(state)
        for placement in geometry.placements:
            case = state.windows or (), placement.window
            if case in seen or placement.window & state.mask:
                continue
            seen.add(case)
            where = placement.profile, placement.start
            last, cost = reference_lost_time(
                gpu, *where, asked, policy.stranding, dict(weights), policy.spares
            )
            assert policy.score(state, *where) == (last, float(cost))
            empty, lost = reference_least_lost(gpu, *where, asked)
            assert counts.score(state, *where) == (empty, float(lost * geometry.slices))


def test_time_lost_by_hand(a100: Geometry) -> None:
    """A 1g beside instances of the same window: each blocker shares the time."""
    one = a100.profile("1g.10gb")
    asked = LeastLostTime(frozenset({"1g.10gb", "3g.40gb"}))
    empty = empty_state(a100)
    # Its own window, and the 3g at 0 that is open now; no slice is stranded.
    assert asked.score(empty, one, 0) == (False, 1 + 4)
    beside = empty.after(a100.placements[1])  # a 1g at 1 is in the 3g's window already
    assert asked.score(beside, one, 0) == (False, 1 + 4 / 2)
    again = beside.after(a100.placements[2])
    assert asked.score(again, one, 0) == (False, float(1 + Fraction(4, 3)))
    # Slice 7 can be used only by the 3g at 4.
    assert asked.score(empty, one, 6) == (False, 1 + 4 + 4)
    # Where a whole GPU is asked for, an empty one is opened last.
    assert LeastLostTime().score(empty, one, 0)[0]
    assert not LeastLostTime().score(beside, one, 0)[0]
    # So it is where the policy spares empty ones.
    sparing = LeastLostTime(asked.asked_for, spares=True)
    assert sparing.score(empty, one, 0) == (True, 1 + 4)
    assert sparing.score(beside, one, 0) == asked.score(beside, one, 0)


def test_without_windows_a_blocked_place_has_at_least_one_blocker(a100: Geometry) -> None:
    one = a100.profile("1g.10gb")
    policy = LeastLostTime(frozenset({"3g.40gb"}))
    assert policy.score(GpuState(a100, 0b0110, (2, 0)), one, 0) == (False, 4 / 2)


def test_profiles_asked_for(a100: Geometry) -> None:
    def names(*asked: str) -> list[str]:
        return [p.name for p in asked_profiles(a100, frozenset(asked))]

    assert names("2g.20gb", "1g.10gb") == ["1g.10gb", "2g.20gb"]
    assert names("1g.10gb+me") == ["1g.10gb"], "a variant takes the same windows"
    plain = [p.name for p in a100.plain_profiles]
    assert names("1g.6gb") == plain, "unknown here: nothing is known of this model"
    assert names() == plain


def test_policies_with_the_same_parameters_are_the_same() -> None:
    asked = frozenset({"1g.10gb"})
    assert LeastLostTime(asked) == LeastLostTime(frozenset({"1g.10gb"}))
    assert len({LeastLostTime(asked), LeastLostTime(asked), LeastLostTime(), LeastLost()}) == 3
    assert LeastLost(asked) != LeastLost()


def test_words(a100: Geometry) -> None:
    scheduler = Scheduler(Cluster.of(a100, 1), "least-lost-time")
    words = scheduler.policy.in_words
    assert words((False, 2.5), a100) == "places asked for stay shut for 2.5 slice-lifetimes longer"
    assert words((True, 1 / 3), a100) == (
        "places asked for stay shut for 0.333 slice-lifetimes longer on an empty GPU, "
        "which is opened last"
    )


def test_the_other_models_have_the_same_layouts() -> None:
    def layout(geometry: Geometry) -> object:
        return geometry.slices, {(p.window, geometry.needs(p.profile)) for p in geometry.placements}

    swept = [layout(load_geometry(model)) for model in MODELS]
    for entry in Catalog.builtin().entries():
        assert entry.geometry is None or layout(entry.geometry) in swept
