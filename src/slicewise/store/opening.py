"""Opening a store: SQLite in a data folder, or PostgreSQL by URL."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slicewise.core.errors import SlicewiseError
from slicewise.lockfile import InUseError
from slicewise.store.contents import Contents
from slicewise.store.hatch import Hatch, through_hatch
from slicewise.store.read_only import is_read_only, reading
from slicewise.store.sql import SqlStore
from slicewise.store.sqlite import SqliteStore

_log = logging.getLogger(__name__)


def open_store(data: Path | None, database: str | None = None, *, begin: bool = True) -> SqlStore:
    """The store in the database of that URL, or else in the data folder, which must exist.

    Tables are brought to this version, or made; EmptyError where there are none and none may be.
    """
    if database is not None:
        return _postgres(database, migrate=True, begin=begin)
    store = SqliteStore(_folder(data), begin=begin)
    try:
        store.along.callback(Hatch(store.path.parent, store).close)
    except SlicewiseError as error:
        # On a full disk, say, or a file system without sockets: the service can do without.
        _log.warning("no backups while the service runs: %s", error)
    return store


@contextmanager
def open_contents(data: Path | None, database: str | None = None) -> Iterator[Contents]:
    """What a store holds, to read only; it may be in use by a service, and is not migrated."""
    if database is not None:
        store = _postgres(database, migrate=False)
    else:
        folder = _folder(data)
        try:
            if is_read_only(folder):
                with reading(folder) as store:
                    yield store.contents()
                return
            store = SqliteStore(folder, migrate=False)
        except InUseError:
            with through_hatch(folder) as contents:
                if contents is None:
                    raise
                yield contents
            return
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
