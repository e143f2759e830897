"""Backups: whole or refused, the same on every database, and made while others write."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import socket
import stat
import threading
from pathlib import Path

import pytest
from tests.store.busy import Busy, fill
from tests.store.conftest import Home

from slicewise.control.image import image_of
from slicewise.control.ports import FencedError, Store
from slicewise.control.writer import load
from slicewise.core.errors import SlicewiseError
from slicewise.lockfile import InUseError
from slicewise.store import backup, hatch, open_backup, open_contents, open_store, restore, verify
from slicewise.store.contents import Contents, StoredAnswer, StoredImage, StoredRow
from slicewise.store.sql import SqlStore

Everything = tuple[list[StoredImage], list[StoredAnswer], list[StoredRow]]


def everything(contents: Contents) -> Everything:
    """All there is, in an order that does not depend on the database."""
    return (
        list(contents.images()),
        sorted(contents.answers()),
        [row._replace(filed=None) for row in contents.rows()],
    )


def filed(store: SqlStore) -> list[object]:
    return [row.filed for row in store.contents().rows()]


def test_a_backup_holds_everything(home: Home, other_home: Home, tmp_path: Path) -> None:
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
    assert image_of(load(other, busy.office.fresh())) == image_of(busy.office.state)


def test_the_service_goes_on_in_a_later_epoch(home: Home, tmp_path: Path) -> None:
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


def test_an_empty_store(store: SqlStore, other_home: Home, tmp_path: Path) -> None:
    assert backup(store, tmp_path / "backup") == 0
    other = other_home.open()
    assert restore(tmp_path / "backup", other) == 0
    assert everything(other.contents()) == ([], [], [])


def test_a_backup_is_for_its_owner_and_never_overwrites(store: SqlStore, tmp_path: Path) -> None:
    fill(store, 50)
    file = tmp_path / "backup"
    backup(store, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.read_bytes()
    with pytest.raises(SlicewiseError, match="exists already"):
        backup(store, file)
    assert file.read_bytes() == before
    for nowhere in (tmp_path / "nowhere" / "backup", file / "under", tmp_path / ("backup" * 50)):
        with pytest.raises(SlicewiseError, match="cannot be written"):
            backup(store, nowhere)
    assert [path.name for path in tmp_path.iterdir() if "backup" in path.name] == ["backup"]


def test_what_was_written_meanwhile_is_not_overwritten(store: SqlStore, tmp_path: Path) -> None:
    fill(store, 50)
    file = tmp_path / "backup"
    with pytest.raises(SlicewiseError, match="exists already"):
        backup(store, file, lambda rows: file.touch())
    assert file.read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir() if "backup" in path.name] == ["backup"]


def test_while_others_write(home: Home, other_home: Home, tmp_path: Path) -> None:
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
                store.keep_image(busy.image())

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
    # What was answered in front of the last row is there, and nothing that came later.
    known = other.answers([key for key, _, _ in busy.answers])
    whole = {answer.key: answer.seq for answer in store.contents().answers()}
    assert {key.key for key in known} == {key for key, seq in whole.items() if seq <= rows}


# What is refused


def test_only_an_empty_store_is_restored_into(home: Home, tmp_path: Path) -> None:
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


def test_a_file_that_was_cut_short(tmp_path: Path, other_home: Home, lines: list[bytes]) -> None:
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
    """The lines with an end that fits them."""
    end = json.loads(lines[-1])
    rows = sum(line.startswith(b'["row"') for line in lines)
    digest = hashlib.sha256(b"".join(lines[:-1])).hexdigest()
    return [*lines[:-1], json.dumps([*end[:3], rows, digest]).encode() + b"\n"]


def test_a_file_that_was_changed(tmp_path: Path, other_home: Home, lines: list[bytes]) -> None:
    store = other_home.open()
    file = tmp_path / "bad"
    header, end = json.loads(lines[0]), json.loads(lines[-1])
    rows = [number for number, line in enumerate(lines) if line.startswith(b'["row"')]
    newer = [header[0], 99, *header[2:]]
    for changed, problem in (
        (sealed(lines[: rows[3]] + lines[rows[4] :]), "the backup's journal jumps"),
        (lines[:-2] + lines[-1:], "digest does not fit"),
        (lines[:-1], "cut short"),
        ([*lines, lines[-1]], "something follows"),
        ([*lines, b"\n"], "something follows"),
        ([*lines[:-1], lines[1], lines[-1]], "out of order"),
        ([line.replace(b"acme", b"blue") for line in lines], "digest does not fit"),
        ([*lines[:-1], json.dumps([*end[:3], end[3] + 1, end[4]]).encode()], "as many lines"),
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


def test_a_store_in_use_is_read_through_its_hatch(home: Home, tmp_path: Path) -> None:
    store = home.open()
    fill(store)
    with open_contents(home.data, home.database) as contents:
        assert everything(contents) == everything(store.contents())
    with open_contents(home.data, home.database) as contents:
        assert verify(contents).findings == []
    store.close()
    with open_contents(home.data, home.database) as contents:
        assert len(list(contents.images())) == 2


def test_a_hatch_in_a_folder_with_a_long_name(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    store = open_store(folder)
    busy = fill(store, 50)
    with open_contents(folder) as contents:
        assert len(everything(contents)[2]) == len(busy.office.rows)
    store.close()


def test_a_visitor_who_leaves_early_does_no_harm(tmp_path: Path) -> None:
    store: Store = open_store(tmp_path)
    assert isinstance(store, SqlStore)
    busy = fill(store, 3000)
    for _ in range(3):
        with open_contents(tmp_path) as contents:
            next(contents.images())
    with open_contents(tmp_path) as contents:
        assert len(everything(contents)[2]) == len(busy.office.rows)
    store.close()


def test_a_hatch_that_could_not_let_a_visitor_in_opens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Crowded(socket.socket):
        refuses = 2

        def accept(self) -> tuple[socket.socket, object]:
            if Crowded.refuses:
                Crowded.refuses -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(hatch, "RETRY_SECONDS", 0.001)
    with monkeypatch.context() as crowded:
        crowded.setattr("slicewise.store.hatch.socket.socket", Crowded)
        store = open_store(tmp_path)
    busy = fill(store, 20)
    assert len(read_in_use(tmp_path)[2]) == len(busy.office.rows)
    assert "Too many open files" in caplog.text
    store.close()


def test_a_service_without_a_hatch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "slicewise.sock").mkdir()
    store = open_store(tmp_path)
    assert "no backups while the service runs" in caplog.text
    fill(store, 20)
    with pytest.raises(InUseError), open_contents(tmp_path):
        pass
    store.close()
    with open_contents(tmp_path) as contents:
        assert contents.last_seq >= 20


def test_a_folder_in_use_by_something_else(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (tmp_path / "slicewise.sock").unlink()
    with pytest.raises(InUseError), open_contents(tmp_path):
        pass
    store.close()


def read_in_use(folder: Path) -> Everything:
    with open_contents(folder) as contents:
        return everything(contents)


def test_a_store_that_fails_on_the_way_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    fill(store, 50)

    def broken(self: object) -> list[StoredRow]:
        raise SlicewiseError("the disk is gone")

    monkeypatch.setattr("slicewise.store.sql.StoreContents.rows", broken)
    with pytest.raises(SlicewiseError, match="damaged or was cut short"):
        read_in_use(tmp_path)
    store.close()
