"""Stranded slices: hand-worked states, and a comparison with the plain definition."""

from __future__ import annotations

import pytest

from slicewise import load_geometry
from slicewise.catalog import Catalog
from slicewise.core.geometry import Geometry
from slicewise.core.states import GpuState, empty_state, state_space
from slicewise.dashboard.comparison import stranded

A100 = load_geometry("A100-80GB")
MODELS = [entry.require() for entry in Catalog.builtin().entries() if entry.refusal is None]


def state(*placements: tuple[str, int]) -> GpuState:
    """An A100 with these profiles at these starts."""
    made = empty_state(A100)
    for profile, start in placements:
        placement = A100.placement(profile, start)
        assert placement is not None
        made = made.after(placement)
    return made


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ((), []),
        ((("7g.80gb", 0),), []),
        ((("3g.40gb", 0),), []),  # a window for another 3g is open
        # Six slices are free, but no window of four: 1g at 1 and 6 block them.
        ((("1g.10gb", 1), ("1g.10gb", 6)), [0, 2, 3, 4, 5, 7]),
        # Slice 7 alone begins no window.
        ((("1g.10gb", 6),), [7]),
        # All compute is used, so no instance could use slice 7 in any position.
        (tuple(("1g.10gb", start) for start in range(7)), []),
    ],
)
def test_hand_worked_states(placements: tuple[tuple[str, int], ...], expected: list[int]) -> None:
    found = stranded(state(*placements))
    assert [slice for slice in range(8) if found >> slice & 1] == expected


def slowly(state: GpuState) -> set[int]:
    """The definition, slice by slice."""
    geometry = state.geometry
    taken = {slice for slice in range(geometry.slices) if state.mask >> slice & 1}
    free = set(range(geometry.slices)) - taken
    windows: dict[int, list[set[int]]] = {}
    for profile in geometry.plain_profiles:
        if profile.size <= len(free) and state.within_budgets(profile):
            every = [set(range(start, start + profile.size)) for start in profile.starts]
            windows.setdefault(profile.size, []).extend(w for w in every if not w & taken)
    if not windows:
        return set()
    if not windows[max(windows)]:
        return free
    return free - set().union(*(w for open in windows.values() for w in open))


@pytest.mark.parametrize("built_in", MODELS, ids=lambda model: model.model)
def test_every_state_of_every_model(built_in: Geometry) -> None:
    for each in state_space(built_in).states:
        found = stranded(each)
        assert not found & each.mask
        assert {s for s in range(built_in.slices) if found >> s & 1} == slowly(each)
