"""One process a data folder: a lock of the operating system, gone when its process is."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from slicewise.core.errors import SlicewiseError


class InUseError(SlicewiseError):
    """Another process has the data folder."""


class FolderLock:
    """Holds a data folder until it is let go, or the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SlicewiseError(f"{str(path)!r} cannot be opened: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, 32).decode("ascii", "replace").strip()
            os.close(self._file)
            if not isinstance(error, BlockingIOError):
                raise SlicewiseError(f"{str(path)!r} cannot be locked: {error.strerror}") from None
            who = f"process {holder}" if holder else "another process"
            raise InUseError(
                f"{str(path.parent)!r} is in use by {who}, which holds the lock on {path.name}: "
                "one process at a time may serve from a data folder"
            ) from None
        # For people only: the lock is what counts, so an old number, or none, is no harm.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let the folder go."""
        os.close(self._file)
