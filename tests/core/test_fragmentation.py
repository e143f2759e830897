"""The score F: the paper's example by hand, and every mask of every model."""

from __future__ import annotations

import pytest

from slicewise import Geometry, Reading, blocked_starts, is_fragmented, score, score_by_profile
from slicewise.core.fragmentation import score_table
from slicewise.policies.reference import ReferenceGpu, reference_score


def slices_of(mask: int) -> set[int]:
    return {i for i in range(16) if mask >> i & 1}


def test_the_papers_worked_example(a100: Geometry) -> None:
    mask = a100.mask("11000100")
    assert score(a100, mask, Reading.PARTIAL) == 16
    assert score(a100, mask, Reading.OVERLAP) == 23
    assert score_by_profile(a100, mask, Reading.PARTIAL) == {
        "1g.10gb": 0,
        "1g.20gb": 2,
        "2g.20gb": 2,
        "3g.40gb": 8,
        "4g.40gb": 4,
        "7g.80gb": 0,
    }
    assert blocked_starts(a100, a100.profile("3g.40gb"), mask, Reading.PARTIAL) == (0, 4)
    assert blocked_starts(a100, a100.profile("7g.80gb"), mask, Reading.OVERLAP) == ()


def test_empty_and_full_gpus_are_not_fragmented(geometry: Geometry) -> None:
    for reading in Reading:
        assert score(geometry, 0, reading) == 0
        assert score(geometry, geometry.full, reading) == 0


@pytest.mark.parametrize("reading", Reading)
def test_every_mask_agrees_with_the_definition(geometry: Geometry, reading: Reading) -> None:
    table = score_table(geometry, reading)
    assert len(table) == 1 << geometry.slices
    for mask in range(1 << geometry.slices):
        expected = reference_score(geometry, slices_of(mask), reading)
        assert table[mask] == expected
        assert score(geometry, mask, reading) == expected


def test_fragmented_means_enough_slices_but_no_window_on_every_mask(geometry: Geometry) -> None:
    for mask in range(1 << geometry.slices):
        occupied = slices_of(mask)
        for profile in geometry.profiles:
            windows = [set(range(s, s + profile.size)) for s in profile.starts]
            room = profile.size <= geometry.slices - len(occupied)
            expected = room and not any(w.isdisjoint(occupied) for w in windows)
            assert is_fragmented(geometry, profile, mask) == expected


def test_the_reference_agrees_on_fragmented(a100: Geometry) -> None:
    gpu = ReferenceGpu(a100)
    assert not gpu.fragmented(a100.profile("4g.40gb"))
