"""The fair queue: in order within a share, in rotation between shares."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slicewise.runtime.fair_queue import FairQueue


def test_shares_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.append(item[0], item)
    assert (len(queue), queue.waiting("a"), queue.waiting("z")) == (6, 3, 0)
    assert [queue.popleft() for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert not queue


@given(st.lists(st.one_of(st.none(), st.integers(0, 3)), max_size=80))
def test_no_item_is_lost_and_every_share_is_served_once_a_round(
    steps: list[int | None],
) -> None:
    """None takes an item out, a number adds one of that share."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    added: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    overtaken: dict[int, Counter[int]] = {}
    """For each queued share: which others were served since its last turn."""
    for share in steps:
        if share is not None:
            queue.append(share, (share, added[share]))
            added[share] += 1
            overtaken.setdefault(share, Counter())
        elif queue:
            got, number = queue.popleft()
            assert number == taken[got], "in order within a share"
            taken[got] += 1
            overtaken.pop(got)
            if added[got] > taken[got]:
                overtaken[got] = Counter()
            for waits, others in overtaken.items():
                if waits != got:
                    others[got] += 1
                    assert others[got] == 1, f"{got} was served twice while {waits} waited"
    assert len(queue) == added.total() - taken.total()
