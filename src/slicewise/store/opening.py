"""Opening a store: SQLite in a data folder, or PostgreSQL by URL.

A data folder may be read-only: a mounted volume, or a folder of another user. SQLite writes even to
read (a log and shared memory beside the file), so such a database is read as it is. If a log with
unmerged changes is beside it, both are copied to a temporary folder first.
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
from slicewise.store.contents import Contents
from slicewise.store.sql import SqlStore
from slicewise.store.sqlite import DATABASE, LOCK, SqliteStore

_LOGS = (f"{DATABASE}-wal", f"{DATABASE}-journal")


def open_store(data: Path | None, database: str | None = None, *, begin: bool = True) -> SqlStore:
    """Open the database with that URL, or else the one in the data folder, which must exist.

    Tables are migrated to this version. If there are none they are created, or, without ``begin``,
    EmptyError is raised.
    """
    if database is not None:
        return _postgres(database, migrate=True, begin=begin)
    return SqliteStore(_folder(data), begin=begin)


@contextmanager
def open_contents(data: Path | None, database: str | None = None) -> Iterator[Contents]:
    """The contents of a store, for reading. The tables are not migrated.

    A PostgreSQL database may be in use by a service. A data folder may not: with SQLite, only the
    process that serves from it can read it.
    """
    if database is not None:
        store = _postgres(database, migrate=False)
    else:
        folder = _folder(data)
        try:
            if _is_read_only(folder):
                with _read_only_store(folder) as store:
                    yield store.contents()
                return
            store = SqliteStore(folder, migrate=False)
        except InUseError as error:
            raise InUseError(
                f"{error}: take a backup of a running service with "
                "'slicewise backup --server URL FILE'"
            ) from None
    try:
        yield store.contents()
    finally:
        store.close()


def _postgres(url: str, *, migrate: bool, begin: bool = True) -> SqlStore:
    try:
        from slicewise.store.postgres import PostgresStore
    except ImportError as error:
        raise SlicewiseError(
            f"PostgreSQL needs the package {error.name}: install slicewise[postgres]"
        ) from None
    return PostgresStore(url, migrate=migrate, begin=begin)


def _folder(data: Path | None) -> Path:
    if data is None:
        raise SlicewiseError("name a data folder, or the URL of a PostgreSQL database")
    try:
        there = data.is_dir()
    except OSError as error:
        raise SlicewiseError(f"{str(data)!r} cannot be reached: {error.strerror}") from None
    if not there:
        raise SlicewiseError(f"there is no folder {str(data)!r}")
    return data


def _is_read_only(folder: Path) -> bool:
    """Whether the folder, or the database in it, is not writable."""
    database = folder / DATABASE
    return not os.access(folder, os.W_OK) or (
        database.exists() and not os.access(database, os.W_OK)
    )


@contextmanager
def _read_only_store(folder: Path) -> Iterator[SqliteStore]:
    """Open the store in a folder that is not writable."""
    with _shared_lock(folder / LOCK):
        logs = [name for name in _LOGS if _has_content(folder / name)]
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


def _has_content(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


@contextmanager
def _shared_lock(path: Path) -> Iterator[None]:
    """Refuse a folder that is in use: its contents would change while they are read."""
    try:
        lock = FileLock(path, create=False, shared=True)
    except InUseError as error:
        raise InUseError(f"{str(path.parent)!r} is in use: {error}") from None
    except OSError:  # there is no lock file, or it belongs to another user
        yield
        return
    try:
        yield
    finally:
        lock.release()
