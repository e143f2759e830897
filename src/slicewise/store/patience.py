"""Patience with a database that does not answer: there is an end to it.

A server that is cut off, or stopped, may keep its connections open and say nothing. PostgreSQL's
own time limits are of no use then, since it is the server that keeps them. So every call has a
deadline here, and a thread that cuts the line when it has passed; the call then fails as it does
whenever a connection is lost.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Line:
    """A hold on a connection's socket that stays good when its owner closes it."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))

    def cut(self) -> None:
        """End whatever is being waited for on it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        self._socket.close()


class Patience:
    """Cuts the lines of calls that take longer than they may."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[float, Line]] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._wakes = float("inf")
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
        self._thread.start()

    @contextmanager
    def for_at_most(self, seconds: float, line: Line) -> Iterator[None]:
        """Cut the line if what happens inside takes longer."""
        number = next(self._numbers)
        deadline = time.monotonic() + seconds
        with self._changed:
            self._calls[number] = (deadline, line)
            if deadline < self._wakes:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._calls.pop(number, None)

    def close(self) -> None:
        """Stop watching."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for number, (deadline, line) in list(self._calls.items()):
                    if deadline <= now:
                        del self._calls[number]
                        line.cut()
                self._wakes = min((deadline for deadline, _ in self._calls.values()), default=1e12)
                self._changed.wait(min(self._wakes - now, threading.TIMEOUT_MAX))
