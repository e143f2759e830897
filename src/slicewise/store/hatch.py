"""A hatch in a store that is in use: another process on this machine may take a backup through it.

Where SQLite has the WAL-reset defect the service has the only connection there can be, so whoever
wants to read asks the service. The hatch is a socket in the data folder that only the folder's
owner can open; whoever connects gets a backup.
"""

from __future__ import annotations

import gzip
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slicewise.core.errors import SlicewiseError
from slicewise.store.backups import BackupContents, write
from slicewise.store.sql import SqlStore

HATCH = "slicewise.sock"
SEND_SECONDS = 60.0
"""How long whoever takes a backup may pause."""
RETRY_SECONDS = 1.0
"""How long to wait before listening again, when that failed."""

_log = logging.getLogger(__name__)


class Hatch:
    """Listens in a data folder, and hands out backups one after the other."""

    def __init__(self, folder: Path, store: SqlStore) -> None:
        self._store = store
        self._path = folder / HATCH
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._path.unlink(missing_ok=True)  # left by a process that was killed
            with _short(self._path) as name:
                self._listener.bind(name)
            self._path.chmod(0o600)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise SlicewiseError(
                f"{str(self._path)!r} cannot be made: {error.strerror or error}"
            ) from None
        self._thread = threading.Thread(target=self._serve, name="hatch", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                visitor, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:  # too many files are open, say, which passes
                    _log.warning("nobody can take a backup: %s", error.strerror)
                    time.sleep(RETRY_SECONDS)
                continue
            with visitor, suppress(OSError):
                visitor.settimeout(SEND_SECONDS)
                try:
                    with visitor.makefile("wb") as file:
                        write(self._store.contents(), file)
                except SlicewiseError as error:
                    # Without its end, the visitor knows that the backup is not whole.
                    _log.warning("a backup was broken off: %s", error)

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)


@contextmanager
def through_hatch(folder: Path) -> Iterator[BackupContents | None]:
    """The contents of the store in use in this folder; None if nobody opens."""
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.settimeout(SEND_SECONDS)
        try:
            with _short(folder / HATCH) as name:
                visitor.connect(name)
        except OSError:
            yield None
            return
        with visitor.makefile("rb") as file, gzip.GzipFile(fileobj=file) as lines:
            yield BackupContents(iter(lines), f"what the service in {str(folder)!r} sent")


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for a socket that is never too long: about a hundred bytes are all it may have."""
    if len(os.fsencode(path)) < 100:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
