"""Backups: complete or refused, the same for both databases, consistent during commits."""

from __future__ import annotations

import gzip
import hashlib
import json
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.postgres import PostgresServer
from tests.store.busy import Busy, fill
from tests.store.conftest import Destination

from slicewise.control.ports import FencedError, StoreError
from slicewise.control.snapshot import snapshot_of
from slicewise.core.errors import SlicewiseError
from slicewise.lockfile import InUseError
from slicewise.runtime.commit_loop import load
from slicewise.store import (
    backup,
    open_backup,
    open_contents,
    open_store,
    restore,
    save_backup,
    verify,
)
from slicewise.store.backup_file import backup_pieces
from slicewise.store.contents import Contents, StoredAnswer, StoredRow, StoredSnapshot
from slicewise.store.sql import SqlStore

Everything = tuple[list[StoredSnapshot], list[StoredAnswer], list[StoredRow]]


def everything(contents: Contents) -> Everything:
    """The whole contents, in an order that does not depend on the database."""
    return (
        list(contents.snapshots()),
        sorted(contents.answers()),
        [row._replace(filed=None) for row in contents.rows()],
    )


def filed(store: SqlStore) -> list[object]:
    return [row.filed for row in store.contents().rows()]


def test_a_backup_contains_everything(
    home: Destination, other_home: Destination, tmp_path: Path
) -> None:
    store = home.open()
    busy = fill(store)
    file = tmp_path / "backup"
    assert backup(store, file) == len(busy.office.rows)
    with open_backup(file) as contents:
        assert everything(contents) == everything(store.contents())
    other = other_home.open()
    assert restore(file, other) == len(busy.office.rows)
    assert everything(other.contents()) == everything(store.contents())
    assert filed(other) == filed(store)
    assert verify(other).findings == []
    assert other.rows(0, 100_000) == busy.office.rows
    assert other.answers([key for key, _, _ in busy.answers]) == {
        key: kept for key, kept, _ in busy.answers
    }
    assert snapshot_of(load(other, busy.office.fresh())) == snapshot_of(busy.office.state)


def test_a_restored_store_continues_with_a_later_epoch(home: Destination, tmp_path: Path) -> None:
    store = home.open()
    fill(store, 50)
    backup(store, tmp_path / "backup")
    store.close()
    (tmp_path / "new").mkdir()
    other = open_store(tmp_path / "new")
    early = other.lead("early", "", 3600)
    assert early is not None
    restore(tmp_path / "backup", other)
    with pytest.raises(FencedError):
        other.append(early, [], [])
    epoch = other.lead("me", "", 3600)
    assert epoch is not None
    assert epoch > max(row.epoch for row in other.contents().rows())
    assert other.wait_for_rows(0, 0)
    other.close()


def test_a_backup_of_an_empty_store(
    store: SqlStore, other_home: Destination, tmp_path: Path
) -> None:
    assert backup(store, tmp_path / "backup") == 0
    other = other_home.open()
    assert restore(tmp_path / "backup", other) == 0
    assert everything(other.contents()) == ([], [], [])


def test_a_backup_is_private_and_replaces_no_file(store: SqlStore, tmp_path: Path) -> None:
    fill(store, 50)
    file = tmp_path / "backup"
    backup(store, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_bytes()
    with pytest.raises(SlicewiseError, match="already exists"):
        backup(store, file)
    assert file.read_bytes() == before
    for nowhere in (tmp_path / "nowhere" / "backup", file / "under", tmp_path / ("backup" * 50)):
        with pytest.raises(SlicewiseError, match="cannot be written"):
            backup(store, nowhere)
    assert [path.name for path in tmp_path.iterdir() if "backup" in path.name] == ["backup"]


def test_a_file_created_during_the_backup_is_not_replaced(store: SqlStore, tmp_path: Path) -> None:
    fill(store, 50)
    file = tmp_path / "backup"
    with pytest.raises(SlicewiseError, match="already exists"):
        backup(store, file, lambda rows: file.touch())
    assert file.read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir() if "backup" in path.name] == ["backup"]


def test_a_backup_during_commits_is_consistent(
    home: Destination, other_home: Destination, tmp_path: Path
) -> None:
    store = home.open()
    busy = Busy(seed=3)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    stop = threading.Event()

    def write() -> None:
        written = given = 0
        while not stop.is_set():
            busy.work(written + 7)
            store.append(epoch, busy.office.rows[written:], busy.answers[given:])
            written, given = len(busy.office.rows), len(busy.answers)
            if written % 5 == 0:
                store.save_snapshot(busy.snapshot())

    writer = threading.Thread(target=write)
    writer.start()
    files = [tmp_path / f"backup {number}" for number in range(6)]
    for number, file in enumerate(files):
        store.wait_for_rows(number * 40, 60)
        backup(store, file)
    stop.set()
    writer.join()
    for file in files:
        with open_backup(file) as contents:
            report = verify(contents)
        assert report.findings == []
        assert report.rows > 0
    other = other_home.open()
    rows = restore(files[-1], other)
    assert other.rows(0, 100_000) == busy.office.rows[:rows]
    # Answers up to the last row are included, and no later ones.
    known = other.answers([key for key, _, _ in busy.answers])
    whole = {answer.key: answer.seq for answer in store.contents().answers()}
    assert {key.key for key in known} == {key for key, seq in whole.items() if seq <= rows}


# Refused files


def test_a_restore_needs_an_empty_store(home: Destination, tmp_path: Path) -> None:
    store = home.open()
    busy = fill(store, 50)
    backup(store, tmp_path / "backup")
    with pytest.raises(SlicewiseError, match="empty database only"):
        restore(tmp_path / "backup", store)
    assert store.rows(0, 1000) == busy.office.rows


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    """The lines of a backup."""
    (tmp_path / "made").mkdir()
    store = open_store(tmp_path / "made")
    fill(store, 60)
    backup(store, tmp_path / "good")
    store.close()
    return gzip.decompress((tmp_path / "good").read_bytes()).splitlines(keepends=True)


def test_a_truncated_file_is_refused(
    tmp_path: Path, other_home: Destination, lines: list[bytes]
) -> None:
    store = other_home.open()
    whole = (tmp_path / "good").read_bytes()
    file = tmp_path / "bad"
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(SlicewiseError, match="damaged or was cut short"):
            restore(file, store)
    assert everything(store.contents()) == ([], [], [])
    restore(tmp_path / "good", store)


def sealed(lines: list[bytes]) -> list[bytes]:
    """The lines with a matching trailer."""
    end = json.loads(lines[-1])
    rows = sum(line.startswith(b'["row"') for line in lines)
    digest = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
    return [*lines[:-1], json.dumps([*end[:3], rows, digest]).encode() + b"\n"]


def test_a_changed_file_is_refused(
    tmp_path: Path, other_home: Destination, lines: list[bytes]
) -> None:
    store = other_home.open()
    file = tmp_path / "bad"
    header, end = json.loads(lines[0]), json.loads(lines[-1])
    rows = [number for number, line in enumerate(lines) if line.startswith(b'["row"')]
    newer = [header[0], 99, *header[2:]]
    for changed, problem in (
        (sealed(lines[: rows[3]] + lines[rows[4] :]), "the backup's journal jumps"),
        (lines[:-2] + lines[-1:], "digest does not match"),
        (lines[:-1], "cut short"),
        ([*lines, lines[-1]], "something follows"),
        ([*lines, b"\n"], "something follows"),
        ([*lines[:-1], lines[1], lines[-1]], "out of order"),
        ([line.replace(b"acme", b"blue") for line in lines], "digest does not match"),
        ([*lines[:-1], json.dumps([*end[:3], end[3] + 1, end[4]]).encode()], "number of lines"),
        ([json.dumps(newer).encode() + b"\n", *lines[1:]], "has format 99"),
        ([*lines[1:]], "not a backup"),
        ([lines[0], b"[]\n", *lines[1:]], "damaged"),
        ([b"{}\n"], "damaged"),
        (
            sealed([*lines[:-2], lines[-2].replace(b"kind", b"sort"), lines[-1]]),
            "of the backup is not what was written",
        ),
    ):
        file.write_bytes(gzip.compress(b"".join(changed)))
        with pytest.raises(SlicewiseError, match=problem):
            restore(file, store)
    file.write_bytes(b"plain text, and quite a lot of it")
    with pytest.raises(SlicewiseError, match="damaged"):
        restore(file, store)
    with pytest.raises(SlicewiseError, match="cannot be read: No such file"):
        restore(tmp_path / "nothing", store)
    with pytest.raises(SlicewiseError, match="cannot be read"):
        restore(tmp_path, store)
    assert everything(store.contents()) == ([], [], [])
    file.write_bytes(gzip.compress(b"".join(lines)))
    assert restore(file, store) == len(rows)


# A store in use


def test_a_postgresql_database_can_be_read_while_it_is_in_use(server: PostgresServer) -> None:
    database = server.database()
    store = open_store(None, database)
    fill(store)
    with open_contents(None, database) as contents:
        assert everything(contents) == everything(store.contents())
    with open_contents(None, database) as contents:
        assert verify(contents).findings == []
    store.close()


def test_a_data_folder_in_use_is_refused_with_advice(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 20)
    with pytest.raises(InUseError, match="slicewise backup --server URL FILE"):
        open_contents(tmp_path).__enter__()
    store.close()
    with open_contents(tmp_path) as contents:
        assert contents.last_seq >= 20


def test_a_truncated_stream_leaves_no_file(store: SqlStore, tmp_path: Path) -> None:
    fill(store, 60)
    pieces = list(backup_pieces(store.contents()))
    whole = b"".join(pieces)
    file = tmp_path / "backup"
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(SlicewiseError, match="from the service is damaged or was cut short"):
            save_backup([whole[:length]], file)
        assert [path.name for path in tmp_path.iterdir() if "backup" in path.name] == []
    assert save_backup(pieces, file) == store.last_seq()
    with open_backup(file) as contents:
        assert everything(contents) == everything(store.contents())


def test_a_failed_stream_leaves_no_file(store: SqlStore, tmp_path: Path) -> None:
    fill(store, 60)

    def failing() -> Iterator[bytes]:
        yield from backup_pieces(store.contents())
        raise SlicewiseError("the connection is gone")

    with pytest.raises(SlicewiseError, match="the connection is gone"):
        save_backup(failing(), tmp_path / "backup")
    assert not list(tmp_path.glob("*backup*"))


def test_all_pieces_are_small(home: Destination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.store.backup_file.PIECE_BYTES", 1000)
    store = home.open()
    fill(store, 300)
    pieces = list(backup_pieces(store.contents()))
    assert len(pieces) > 5
    assert max(map(len, pieces)) <= 1000
    assert all(pieces)


def test_rows_pruned_during_the_backup_end_it(home: Destination) -> None:
    """Otherwise a slow reader would get a backup with a gap, which cannot be restored."""
    store = home.open()
    busy = fill(store, 300)
    contents = store.contents()
    epoch = store.contents().epoch
    assert store.prune(epoch, float("inf"), None) > 0
    with pytest.raises(StoreError, match="left the journal while it was read: try again"):
        list(contents.rows())
    assert len(list(store.contents().rows())) < len(busy.office.rows)
