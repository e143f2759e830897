"""Who is on a GPU: a chain of instances for each, kept in two arrays of small integers.

The first array holds, by GPU, one of its instances; the second, by instance, the next one on the
same GPU. That is four bytes a GPU and four an instance, and no chain is longer than a GPU has
slices.
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
        """Let there be more GPUs, all of them empty."""
        self._head.extend(array("I", [_END]) * count)

    def enter(self, gpu: int, slot: int) -> None:
        """Put an instance on a GPU; a new slot is the next number not used so far."""
        if slot == len(self._next):
            self._next.append(_END)
        self._next[slot] = self._head[gpu]
        self._head[gpu] = slot

    def leave(self, gpu: int, slot: int) -> None:
        """Take an instance that is there off its GPU."""
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
