"""File locks: held by one process at a time, and released by the system when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from slicewise.core.errors import SlicewiseError


class InUseError(SlicewiseError):
    """Another process holds the lock."""


class FileLock:
    """Locks a file until `release`, or until the process ends.

    The file is created if missing, and contains the id of the process. With ``create=False`` an
    existing file is locked and not written to. With ``shared=True`` others may share the lock.
    Raises InUseError, or OSError if the file cannot be opened or locked.
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
            # For error messages only: a stale id, or none, does no harm.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Unlock the file."""
        os.close(self._file)


def held(path: Path, holder: object = "") -> InUseError:
    """The error for a locked file; it names the process if that is known."""
    who = f"process {holder}" if holder else "another process"
    return InUseError(f"{who} holds {str(path)!r}")
