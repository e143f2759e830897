"""The ordered set of ids, compared with Python's set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.core.idset import NONE, IdSet

IDS = st.one_of(st.integers(0, 40), st.integers(1000, 1050), st.integers(0, 200_000))


@given(st.lists(st.tuples(st.booleans(), IDS)), IDS)
def test_it_behaves_like_a_sorted_set(changes: list[tuple[bool, int]], floor: int) -> None:
    ours, theirs = IdSet(), set[int]()
    for add, member in changes:
        if add and member not in theirs:
            ours.add(member)
            theirs.add(member)
        elif member in theirs:
            ours.remove(member)
            theirs.remove(member)
        assert ours.first == min(theirs, default=NONE)
    assert list(ours) == sorted(theirs)
    assert ours.lowest(floor % 7 + 1) == sorted(theirs)[: floor % 7 + 1]
    assert ours.lowest(1 << 20) == sorted(theirs)
    assert len(ours) == len(theirs)
    assert ours.next(floor) == min((m for m in theirs if m >= floor), default=NONE)
    assert (floor in ours) == (floor in theirs)


def test_the_first_member_may_be_in_a_later_block() -> None:
    ids = IdSet()
    for member in (3, 5000, 100_000):
        ids.add(member)
    ids.remove(3)
    assert ids.first == 5000
    ids.remove(5000)
    assert ids.first == 100_000
    ids.remove(100_000)
    assert ids.first == NONE


@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_the_cost_of_a_change_does_not_grow_with_the_ids(size: int) -> None:
    """A change rewrites one block and the summary; counted in bytes, not in time."""
    ids = IdSet()
    for member in range(0, size, 97):
        ids.add(member)
    blocks = ids._blocks
    before = [id(block) for block in blocks]
    ids.remove(ids.first)
    ids.add(size - 1)
    rewritten = sum(id(block) != old for block, old in zip(blocks, before, strict=False))
    assert rewritten <= 2
    assert max(block.bit_length() for block in blocks) <= 1024
