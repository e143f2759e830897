"""An ordered set of small integers that always knows its lowest member.

Two levels of bitmaps: blocks of 1,024 ids, and one bit a block that says whether the block has
any. Adding, removing and finding the next member touch one block and the summary, so the work
stays the same from ten GPUs to a million.
"""

from __future__ import annotations

from collections.abc import Iterator

_SHIFT = 10
_LOW = (1 << _SHIFT) - 1
_BIT = tuple(1 << i for i in range(1 << _SHIFT))

NONE = 1 << 61
"""Stands for "no id": larger than every id, so that the lowest of several is still `min`."""


class IdSet:
    """A set of ids with its lowest member at hand in ``first``."""

    __slots__ = ("_blocks", "_count", "_summary", "first")

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._summary = 0
        self._count = 0
        self.first = NONE

    def add(self, member: int) -> None:
        """Put an id in that is not in yet."""
        block = member >> _SHIFT
        blocks = self._blocks
        if block >= len(blocks):
            blocks.extend([0] * (block + 1 - len(blocks)))
        old = blocks[block]
        if not old:
            self._summary |= 1 << block
        blocks[block] = old | _BIT[member & _LOW]
        self._count += 1
        if member < self.first:
            self.first = member

    def remove(self, member: int) -> None:
        """Take out an id that is in."""
        block = member >> _SHIFT
        left = self._blocks[block] ^ _BIT[member & _LOW]
        self._blocks[block] = left
        self._count -= 1
        if not left:
            self._summary ^= 1 << block
        if member == self.first:
            if not left:
                summary = self._summary
                if not summary:
                    self.first = NONE
                    return
                block = (summary & -summary).bit_length() - 1
                left = self._blocks[block]
            self.first = block << _SHIFT | (left & -left).bit_length() - 1

    def next(self, floor: int) -> int:
        """The lowest member that is at least ``floor``, or NONE."""
        if floor <= self.first:
            return self.first
        block = floor >> _SHIFT
        if block < len(self._blocks):
            here = self._blocks[block] >> (floor & _LOW)
            if here:
                return floor + (here & -here).bit_length() - 1
        above = self._summary >> (block + 1)
        if not above:
            return NONE
        block += (above & -above).bit_length()
        members = self._blocks[block]
        return block << _SHIFT | (members & -members).bit_length() - 1

    def lowest(self, count: int) -> list[int]:
        """The lowest members, at most so many, ascending."""
        found: list[int] = []
        summary = self._summary
        while summary:
            low = summary & -summary
            summary ^= low
            block = low.bit_length() - 1
            members = self._blocks[block]
            floor = (block << _SHIFT) - 1
            while members:
                low = members & -members
                found.append(floor + low.bit_length())
                if len(found) == count:
                    return found
                members ^= low
        return found

    def __contains__(self, member: int) -> bool:
        block = member >> _SHIFT
        return block < len(self._blocks) and bool(self._blocks[block] >> (member & _LOW) & 1)

    def __iter__(self) -> Iterator[int]:
        member = self.first
        while member != NONE:
            yield member
            member = self.next(member + 1)

    def __len__(self) -> int:
        return self._count
