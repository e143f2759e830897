"""Every reachable state of every model, compared with the hardware's rules."""

from __future__ import annotations

import itertools

import pytest

from slicewise import Geometry
from slicewise.core.errors import GeometryError
from slicewise.core.geometry import Budget, Profile
from slicewise.core.states import ILLEGAL, empty_state, keeps_windows, state_space
from slicewise.core.tables import drop_tables
from slicewise.policies.reference import Held, ReferenceGpu


def layouts(geometry: Geometry) -> list[ReferenceGpu]:
    """Yield every legal set of instances, found without masks or tables."""
    found: dict[frozenset[tuple[str, int]], ReferenceGpu] = {}
    frontier = [ReferenceGpu(geometry)]
    while frontier:
        gpu = frontier.pop()
        key = frozenset((held.profile.name, held.start) for held in gpu.held)
        if key in found:
            continue
        found[key] = gpu
        # In ascending placement numbers only, so each set of instances is found once.
        last = max((_number(geometry, held) for held in gpu.held), default=-1)
        for placement in geometry.placements[last + 1 :]:
            if gpu.feasible(placement.profile, placement.start):
                held = [*gpu.held, Held(placement.profile, placement.start)]
                frontier.append(ReferenceGpu(geometry, held))
    return list(found.values())


def _number(geometry: Geometry, held: Held) -> int:
    placement = geometry.placement(held.profile.name, held.start)
    assert placement is not None
    return placement.number


@pytest.mark.unmeasured
def test_every_layout_is_a_state_with_the_same_legality(geometry: Geometry) -> None:
    space = state_space(geometry)
    assert keeps_windows(geometry)
    number = {(state.windows, state.used): n for n, state in enumerate(space.states)}
    reached = set()
    for gpu in layouts(geometry):
        windows = tuple(sorted(h.profile.window(h.start) for h in gpu.held))
        used = tuple(
            map(sum, zip(*(geometry.needs(h.profile) for h in gpu.held), strict=True))
        ) or (0,) * len(geometry.all_budgets)
        here = number[windows, used]
        reached.add(here)
        state = space.states[here]
        assert state.mask == sum(1 << s for s in gpu.occupied)
        assert state.free_slices == gpu.free
        assert state.free_compute == gpu.free_compute
        for profile in geometry.profiles:
            assert list(state.feasible_starts(profile)) == gpu.feasible_starts(profile)
        for placement in geometry.placements:
            blockers = [h for h in gpu.held if h.profile.window(h.start) & placement.window]
            assert state.blockers(placement.window) == len(blockers)
            legal = gpu.feasible(placement.profile, placement.start)
            after = space.after_place[here][placement.number]
            assert (after != ILLEGAL) == legal
            if legal:
                assert space.states[after] == state.after(placement)
                assert space.after_release[after][placement.number] == here
    assert reached == set(range(len(space)))


def test_legality_on_every_mask_is_window_overlap(geometry: Geometry) -> None:
    empty = empty_state(geometry)
    for mask in range(1 << geometry.slices):
        state = type(empty)(geometry, mask, empty.used)
        for profile in geometry.plain_profiles:
            free = [s for s in profile.starts if not profile.window(s) & mask]
            assert list(state.feasible_starts(profile)) == free


def test_a_subset_of_profiles_reaches_a_subset_of_states(a100: Geometry) -> None:
    some = state_space(a100, frozenset({"3g.40gb", "7g.80gb"}))
    assert {state.mask for state in some.states} == {0, 0x0F, 0xF0, 0xFF}
    for row in some.after_place:
        for placement, after in zip(a100.placements, row, strict=True):
            if placement.profile.name not in ("3g.40gb", "7g.80gb"):
                assert after == ILLEGAL


def test_overlap_implies_the_compute_limit_on_the_paper_family(a100: Geometry) -> None:
    plain = [p for p in a100.placements if p.profile.variant_of is None]
    for count in range(1, 4):
        for chosen in itertools.combinations(plain, count):
            if all(not a.window & b.window for a, b in itertools.combinations(chosen, 2)):
                assert sum(p.profile.compute for p in chosen) <= a100.compute


def test_a_model_with_too_many_states_is_refused_before_all_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everywhere = tuple(range(16))
    budgets = tuple(Budget(name, 16) for name in "abc")
    one_of_each = tuple(Profile(b.name, 1, 0, 5, everywhere, uses={b.name: 1}) for b in budgets)
    wild = Geometry("wild", 16, 1, one_of_each, budgets=budgets)
    monkeypatch.setattr("slicewise.core.states.MAX_CELLS", 48 * 2000)
    with pytest.raises(GeometryError, match=r"^wild: .* more than 2,000 states.* fewer starts"):
        state_space(wild)


def test_a_model_with_very_many_states_keeps_the_mask_alone(
    a100: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_apart = state_space(a100)
    monkeypatch.setattr("slicewise.core.states.MOST_WITH_WINDOWS", len(told_apart) - 1)
    drop_tables()
    try:
        space = state_space(a100)
    finally:
        drop_tables()
    assert all(state.windows is None for state in space.states)
    assert {(s.mask, s.used) for s in space.states} == {(s.mask, s.used) for s in told_apart.states}
    assert len(space) == len({(s.mask, s.used) for s in space.states})
    full = next(state for state in space.states if state.mask == a100.full)
    assert full.blockers(0b11) == 1  # at least one
    assert space.states[0].blockers(0b11) == 0
    assert space.states[0].after(a100.placements[0]).windows is None
