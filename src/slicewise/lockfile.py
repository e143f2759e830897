"""Locks on files, held by one process at a time and ended by the operating system with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from slicewise.core.errors import SlicewiseError


class InUseError(SlicewiseError):
    """Another process holds the lock."""


class FileLock:
    """Holds a file until it is released, or the process ends in any way.

    The file is made where there is none, and says which process holds it. With ``create=False`` it
    belongs to others: it is locked, never written. With ``shared=True``, others may share the lock.
    Raises InUseError, or OSError where the file cannot be opened or locked.
    """

    def __init__(self, path: Path, *, create: bool = True, shared: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self._file = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 32).decode("ascii", "replace").strip() if create else ""
            self.release()
            raise held(path, holder) from None
        except OSError:
            self.release()
            raise
        if create:
            # For people only: the lock is what counts, so an old number, or none, is no harm.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let other processes have the file."""
        os.close(self._file)


def held(path: Path, holder: object = "") -> InUseError:
    """The error that names the process which holds a file, if it is known."""
    who = f"process {holder}" if holder else "another process"
    return InUseError(f"{who} holds {str(path)!r}")
