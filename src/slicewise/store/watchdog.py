"""Deadlines for calls to a database that may stop answering.

A server that is paused or unreachable may keep its connections open without answering. PostgreSQL's
own timeouts do not help then, since the server enforces them. So every call has a deadline on this
side, and a thread that shuts down the socket of a call that misses it. The call then fails as after
any lost connection.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Socket:
    """A duplicate of a connection's socket, which stays valid when its owner closes it."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))

    def shut_down(self) -> None:
        """Fail every call that waits on it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicate."""
        self._socket.close()


class Watchdog:
    """Shuts down the sockets of calls that miss their deadline."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[float, Socket]] = {}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._wakes = float("inf")
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="database-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, seconds: float, connection: Socket) -> Iterator[None]:
        """Shut the socket down if the block takes longer."""
        number = next(self._numbers)
        deadline = time.monotonic() + seconds
        with self._changed:
            self._calls[number] = (deadline, connection)
            if deadline < self._wakes:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._calls.pop(number, None)

    def close(self) -> None:
        """Stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                for number, (deadline, connection) in list(self._calls.items()):
                    if deadline <= now:
                        del self._calls[number]
                        connection.shut_down()
                self._wakes = min((deadline for deadline, _ in self._calls.values()), default=1e12)
                self._changed.wait(min(self._wakes - now, threading.TIMEOUT_MAX))
