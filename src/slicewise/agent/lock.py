"""One agent a node: a lock of the operating system, gone when its process is."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from slicewise.core.errors import SlicewiseError


class NodeLock:
    """Holds the agent's folder until it is let go, or the process ends in whatever way."""

    def __init__(self, folder: Path) -> None:
        path = folder / "agent.lock"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SlicewiseError(
                f"{str(folder)!r} cannot be used: {error.strerror} (--state names another folder)"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, 32).decode("ascii", "replace").strip()
            os.close(self._file)
            if not isinstance(error, BlockingIOError):
                raise SlicewiseError(f"{str(path)!r} cannot be locked: {error.strerror}") from None
            who = f"process {holder}" if holder else "another process"
            raise SlicewiseError(
                f"an agent is already at work on this node: {who} holds {str(path)!r}"
            ) from None
        # For people only: the lock is what counts, so an old number, or none, is no harm.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the node go."""
        os.close(self._file)
