"""The instances on each GPU, as linked lists in two arrays.

The first array holds the first instance of each GPU, the second the next instance on the same GPU
for each instance. This takes four bytes per GPU and four per instance. No list is longer than the
number of slices of a GPU.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_END = (1 << 32) - 1


class Residents:
    """The instances on each GPU, by the numbers of their slots."""

    __slots__ = ("_head", "_next")

    def __init__(self) -> None:
        self._head = array("I")
        self._next = array("I")

    def add_gpus(self, count: int) -> None:
        """Add empty GPUs."""
        self._head.extend(array("I", [_END]) * count)

    def enter(self, gpu: int, slot: int) -> None:
        """Add an instance to a GPU; a new slot is the next unused number."""
        if slot == len(self._next):
            self._next.append(_END)
        self._next[slot] = self._head[gpu]
        self._head[gpu] = slot

    def leave(self, gpu: int, slot: int) -> None:
        """Remove an instance from its GPU."""
        following = self._next
        at = self._head[gpu]
        if at == slot:
            self._head[gpu] = following[slot]
            return
        while following[at] != slot:
            at = following[at]
        following[at] = following[slot]

    def on(self, gpu: int) -> Iterator[int]:
        """The slots of a GPU's instances, in no particular order."""
        at = self._head[gpu]
        while at != _END:
            yield at
            at = self._next[at]
