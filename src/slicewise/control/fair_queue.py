"""A queue that takes turns: each share gets one item out before any share gets its next."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """First in, first out within a share; round robin between shares, in constant time."""

    __slots__ = ("_items", "_length")

    def __init__(self) -> None:
        self._items: dict[Hashable, deque[T]] = {}
        """By share that waits, in the order of their turns."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def waiting(self, share: Hashable) -> int:
        """How many items of a share wait."""
        return len(self._items.get(share, ()))

    def append(self, share: Hashable, item: T) -> None:
        """Add an item behind those of its share."""
        items = self._items.get(share)
        if items is None:
            self._items[share] = deque((item,))
        else:
            items.append(item)
        self._length += 1

    def popleft(self) -> T:
        """Take the next item of the share whose turn it is; that share goes to the back."""
        share = next(iter(self._items))
        items = self._items.pop(share)
        item = items.popleft()
        if items:
            self._items[share] = items
        self._length -= 1
        return item
