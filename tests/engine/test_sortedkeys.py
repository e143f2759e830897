"""Sorted keys against a sorted list, with small blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.engine import sortedkeys
from slicewise.engine.sortedkeys import SortedKeys


@given(
    keys=st.sets(st.tuples(st.integers(-3, 3), st.integers(0, 60)), max_size=80),
    gone=st.sets(st.tuples(st.integers(-3, 3), st.integers(0, 60)), max_size=80),
)
def test_sorted_keys_behave_like_a_sorted_list(
    keys: set[tuple[int, int]], gone: set[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sortedkeys, "_LARGEST", 4)
        ours = SortedKeys()
        for key in keys:
            ours.add(key)
        for key in keys & gone:
            ours.remove(key)
    left = sorted(keys - gone)
    assert list(ours) == left
    assert ours.first == (left[0] if left else None)
    assert [ours.rank(key) for key in left] == list(range(len(left)))
    for key in keys | gone:
        above = [each for each in left if each > key]
        assert list(ours.above(key)) == above
        assert ours.after(key) == min(above, default=None)
