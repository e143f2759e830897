"""The safe journal mode of each version of SQLite."""

from __future__ import annotations

import pytest

from slicewise.store.sqlite import Version, has_wal_reset_defect, journal_mode

AFFECTED: list[Version] = [
    (3, 7, 0),
    (3, 24, 0),
    (3, 40, 1),
    (3, 44, 0),
    (3, 44, 5),
    (3, 45, 0),
    (3, 45, 6),
    (3, 46, 9),
    (3, 49, 2),
    (3, 50, 0),
    (3, 50, 6),
    (3, 51, 0),
    (3, 51, 2),
]
FIXED: list[Version] = [
    (3, 44, 6),
    (3, 44, 7),
    (3, 50, 7),
    (3, 50, 8),
    (3, 51, 3),
    (3, 51, 4),
    (3, 52, 0),
    (3, 53, 4),
    (4, 0, 0),
]


@pytest.mark.parametrize("version", AFFECTED)
def test_a_version_with_the_defect_gets_exclusive_locking(version: Version) -> None:
    assert has_wal_reset_defect(version)
    assert journal_mode(version)[:2] == ("WAL", "EXCLUSIVE")
    assert "defect" in journal_mode(version).why


@pytest.mark.parametrize("version", FIXED)
def test_a_version_without_the_defect_gets_normal_locking(version: Version) -> None:
    assert not has_wal_reset_defect(version)
    assert journal_mode(version)[:2] == ("WAL", "NORMAL")


def test_a_version_without_wal_gets_a_rollback_journal() -> None:
    assert not has_wal_reset_defect((3, 6, 23))
    assert journal_mode((3, 6, 23))[:2] == ("TRUNCATE", "NORMAL")
