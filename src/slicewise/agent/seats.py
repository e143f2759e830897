"""Which GPU is at which index of the node, so that one that is missing moves no other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from slicewise.agent.record import RecordError, write_file


def seat(remembered: Sequence[str], found: Sequence[str]) -> list[str]:
    """The GPUs by index: each where it was; a new one where one is missing, or behind them.

    >>> seat(["a", "b", "c"], ["a", "c"])
    ['a', 'b', 'c']
    >>> seat(["a", "b", "c"], ["a", "x", "c", "y"])
    ['a', 'x', 'c', 'y']
    """
    new = [gpu for gpu in found if gpu not in remembered]
    seats = [gpu if gpu in found or not new else new.pop(0) for gpu in remembered]
    return seats + new


class Seats:
    """The seating of this node, kept on disk."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gpus.json"
        self._seats: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(data, list) and all(isinstance(gpu, str) for gpu in data):
                self._seats = data

    def take(self, found: Sequence[str]) -> list[str]:
        """Seat the GPUs that were found; those not found keep their places."""
        seats = seat(self._seats, found)
        if seats != self._seats:
            self._seats = seats
            with contextlib.suppress(RecordError):
                write_file(self._path, json.dumps(seats) + "\n")
        return list(seats)
