"""A queue that serves tenants in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Round robin between shares, first in, first out within a share; constant time."""

    __slots__ = ("_items", "_length")

    def __init__(self) -> None:
        self._items: dict[Hashable, deque[T]] = {}
        """The queued items of each share, in the order of turns."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def waiting(self, share: Hashable) -> int:
        """The number of queued items of a share."""
        return len(self._items.get(share, ()))

    def append(self, share: Hashable, item: T) -> None:
        """Add an item after those of its share."""
        items = self._items.get(share)
        if items is None:
            self._items[share] = deque((item,))
        else:
            items.append(item)
        self._length += 1

    def popleft(self) -> T:
        """Remove and return the first item of the next share; its next turn is the last."""
        share = next(iter(self._items))
        items = self._items.pop(share)
        item = items.popleft()
        if items:
            self._items[share] = items
        self._length -= 1
        return item
