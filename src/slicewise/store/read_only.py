"""A data folder that cannot be written to: a volume mounted read-only, or another owner's.

SQLite wants to write even to read: a log beside the file, and its shared memory. Where that cannot
be, the file is read as it is; and if a log stands beside it, from which it must be brought up to
date first, both are copied to a folder where that can be done.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slicewise.core.errors import SlicewiseError
from slicewise.lockfile import FileLock, InUseError
from slicewise.store.sqlite import DATABASE, LOCK, SqliteStore

_LOGS = (f"{DATABASE}-wal", f"{DATABASE}-journal")


def is_read_only(folder: Path) -> bool:
    """Whether nothing can be written to this folder, or to the database in it."""
    database = folder / DATABASE
    return not os.access(folder, os.W_OK) or (
        database.exists() and not os.access(database, os.W_OK)
    )


@contextmanager
def reading(folder: Path) -> Iterator[SqliteStore]:
    """The store in a folder that cannot be written to."""
    with _shared(folder / LOCK):
        logs = [name for name in _LOGS if _holds_something(folder / name)]
        if not logs:
            store = SqliteStore(folder, migrate=False, immutable=True)
            try:
                yield store
            finally:
                store.close()
            return
        with tempfile.TemporaryDirectory(prefix="slicewise-") as copy:
            try:
                for name in (DATABASE, *logs):
                    shutil.copyfile(folder / name, Path(copy) / name)
            except OSError as error:
                raise SlicewiseError(
                    f"{str(folder)!r} cannot be copied to {tempfile.gettempdir()!r}, which takes "
                    f"as much space again: {error.strerror}; name another folder in TMPDIR"
                ) from None
            store = SqliteStore(Path(copy), migrate=False)
            try:
                yield store
            finally:
                store.close()


def _holds_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


@contextmanager
def _shared(path: Path) -> Iterator[None]:
    """Refuse a folder that is in use: what is read would change meanwhile."""
    try:
        lock = FileLock(path, create=False, shared=True)
    except InUseError as error:
        raise InUseError(f"{str(path.parent)!r} is in use: {error}") from None
    except OSError:  # there is none, or it is another user's: then nothing can be known
        yield
        return
    try:
        yield
    finally:
        lock.release()
