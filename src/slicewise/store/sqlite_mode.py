"""How SQLite may keep its journal, which depends on its version.

Versions 3.7.0 to 3.51.2 have the *WAL-reset defect*: when two connections to a database in WAL
mode write or checkpoint at the same moment, a checkpoint may later skip pages that were committed.
3.51.3 fixed it, and so did the patch releases 3.50.7 and 3.44.6. See
https://sqlite.org/wal.html#walresetbug and docs/storage.md.
"""

from __future__ import annotations

from typing import NamedTuple

_WAL_SINCE = (3, 7, 0)
_FIXED = (3, 51, 3)
_PATCHED = ((3, 44, 6), (3, 50, 7))

Version = tuple[int, int, int]


class Mode(NamedTuple):
    """How a database is opened."""

    journal: str
    locking: str
    why: str


def has_wal_reset_defect(version: Version) -> bool:
    """Whether two connections in WAL mode may harm the database."""
    if not _WAL_SINCE <= version < _FIXED:
        return False
    return not any(version[:2] == fix[:2] and version >= fix for fix in _PATCHED)


def journal_mode(version: Version) -> Mode:
    """The fastest mode that is safe.

    A commit in WAL mode takes one sync of the disk, and four times as long without it. The defect
    needs a second connection, so where it is present nobody else gets one: a connection with
    exclusive locking keeps the file locked for as long as it is open.
    """
    name = ".".join(map(str, version))
    if version < _WAL_SINCE:
        return Mode("TRUNCATE", "NORMAL", f"SQLite {name} has no WAL mode")
    if has_wal_reset_defect(version):
        return Mode(
            "WAL",
            "EXCLUSIVE",
            f"SQLite {name} has the WAL-reset defect, so this is the only connection there can be",
        )
    return Mode("WAL", "NORMAL", f"SQLite {name} has no WAL-reset defect: others may read along")
