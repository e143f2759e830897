"""F in compute slices: examples by hand, and every reachable state of every model."""

from __future__ import annotations

import pytest

from slicewise import (
    ComputeReading,
    Geometry,
    GeometryError,
    Profile,
    Use,
    compute_score,
    compute_score_by_profile,
)
from slicewise.core.compute_fragmentation import (
    arrangements,
    compute_score_table,
    compute_window,
    uses,
)
from slicewise.core.states import state_space
from slicewise.policies.reference import reference_compute_score

COMPUTE, EITHER = ComputeReading


def test_the_papers_worked_example(a100: Geometry) -> None:
    """A 2g.20gb at 0 and a 1g.10gb at 5: four compute slices are free, 2, 3, 4 and 6."""
    use = Use(a100.mask("11000100"), 3)
    assert compute_score_by_profile(a100, use) == {
        "1g.10gb": 0,  # 0, 1 and 5 are blocked; their own compute slice is busy
        "1g.20gb": 1,  # at 4
        "2g.20gb": 2,  # at 4
        "3g.40gb": 6,  # at 0 and 4
        "4g.40gb": 4,  # fits by compute: its memory is not asked about
        "7g.80gb": 0,
    }
    assert compute_score(a100, use) == compute_score(a100, use, EITHER) == 13


def test_with_a_1g20gb_in_its_place_one_compute_slice_more_is_free(a100: Geometry) -> None:
    """Compute slice 1 strands a 1g.10gb at 1 and a 2g.20gb at 0."""
    use = Use(a100.mask("11000100"), 2)
    assert compute_score_by_profile(a100, use)["1g.10gb"] == 1
    assert compute_score_by_profile(a100, use)["2g.20gb"] == 4
    assert compute_score(a100, use) == 13 + 1 + 2


def test_either_counts_free_memory_in_front_of_a_busy_compute_slice(a100: Geometry) -> None:
    """After a 1g.10gb at 0, a 1g.20gb there finds its compute slice busy and one slice free."""
    use = Use(a100.mask("10000000"), 1)
    assert compute_score_by_profile(a100, use)["1g.20gb"] == 0
    assert compute_score_by_profile(a100, use, EITHER)["1g.20gb"] == 1


def test_the_least_of_two_arrangements_counts(a100: Geometry) -> None:
    """1g.20gb + 2g.20gb or 3g.40gb: compute slices {0, 2, 3} or {0, 1, 2} behind the same half."""
    use = Use(a100.mask("11110000"), 3)
    assert arrangements(a100)[use] == {0b1101, 0b0111}
    assert compute_score(a100, use) == 7


def test_compute_slices_lie_behind_the_start(a100: Geometry) -> None:
    assert compute_window(a100, a100.profile("3g.40gb"), 4) == 0b1110000
    assert compute_window(a100, a100.profile("1g.20gb"), 6) == 0b1000000
    three_each = Geometry(
        "wide", slices=12, compute=4, profiles=(Profile("2g", 6, 2, 1, starts=(0, 6)),)
    )
    assert compute_window(three_each, three_each.profile("2g"), 6) == 0b1100


@pytest.mark.parametrize("reading", ComputeReading)
def test_every_state_agrees_with_the_definition(
    geometry: Geometry, reading: ComputeReading
) -> None:
    table = compute_score_table(geometry, reading)
    uses = {Use(state.mask, state.used[0]) for state in state_space(geometry).states}
    assert uses <= set(table)
    for use in table:
        occupied = frozenset(i for i in range(geometry.slices) if use.mask >> i & 1)
        expected = reference_compute_score(geometry, occupied, use.compute, reading)
        assert table[use] == compute_score(geometry, use, reading) == expected


def test_either_counts_all_that_compute_counts(geometry: Geometry) -> None:
    narrow = compute_score_table(geometry, COMPUTE)
    wide = compute_score_table(geometry, EITHER)
    assert narrow.keys() == wide.keys()
    assert all(narrow[use] <= wide[use] for use in narrow)
    assert narrow[Use(0, 0)] == wide[Use(0, 0)] == 0
    assert all(not wide[use] for use in wide if use.compute == geometry.compute)


def test_a_mask_may_stand_for_several_uses(a100: Geometry) -> None:
    mask = a100.mask("11000100")
    assert uses(a100, mask) == (Use(mask, 3), Use(mask, 2))
    assert uses(a100, a100.mask("00000001")) == ()
    assert uses(a100, 0) == (Use(0, 0),)


def test_a_state_that_no_instances_make_is_refused(a100: Geometry) -> None:
    with pytest.raises(GeometryError, match=r"no instances occupy 00000001 .* with 1 compute"):
        compute_score(a100, Use(a100.mask("00000001"), 1))


def test_a_model_with_too_many_arrangements_is_refused() -> None:
    """Sixteen slices with windows of one to three in every place."""
    profiles = tuple(
        Profile(f"{size}.{compute}", size, compute, size, tuple(range(17 - size)))
        for size in (1, 2, 3)
        for compute in range(5)
    )
    many = Geometry("many", slices=16, compute=16, profiles=profiles)
    with pytest.raises(GeometryError, match="too many to score by compute slices"):
        arrangements(many)
