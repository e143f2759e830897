"""The SQLite store: its folder, its modes, and failures of the disk."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.store.busy import START, fill
from tests.tenants import ref

from slicewise.control.answers import Answer
from slicewise.control.ports import IdempotencyKey, Kept, StoreError
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Row, TenantSet
from slicewise.lockfile import InUseError
from slicewise.store import open_store, verify
from slicewise.store.sql import SqlStore
from slicewise.store.sqlite import DATABASE, LOCK, Mode, SqliteStore

WAL_SHARED = Mode("WAL", "NORMAL", "for a test")
WAL_ALONE = Mode("WAL", "EXCLUSIVE", "for a test")
ROLLBACK = Mode("TRUNCATE", "NORMAL", "for a test")


def rows(first: int, count: int) -> list[Row]:
    """Rows of about 200 bytes."""
    return [
        Row(seq, START, "a" * 150, TenantSet(ref(f"t{seq}"))) for seq in range(first, first + count)
    ]


def pragma(store: SqliteStore, name: str) -> object:
    with store.session() as connection:
        return connection.exec_driver_sql(f"PRAGMA {name}").scalar()


def test_a_commit_of_any_size(tmp_path: Path) -> None:
    """Commits below, at and above the number of rows of one statement."""
    store = open_store(tmp_path)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    first = 1
    for count in (1, 54, 55, 56, 110, 111, 112, 250):
        some = rows(first, count)
        answers = {
            IdempotencyKey("t", f"k{row.seq}"): Kept("d", Answer(201, b"{}")) for row in some
        }
        store.append(epoch, some, [(key, kept, START) for key, kept in answers.items()])
        assert store.rows(first - 1, 1000) == some
        assert store.answers(list(answers)) == answers
        first += count
    store.close()


# The folder


def test_one_process_at_a_time_uses_the_folder(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(InUseError, match=rf"process {os.getpid()}.*{LOCK}"):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


HOLD = """
import sys
from pathlib import Path
from slicewise.store import open_store
store = open_store(Path(sys.argv[1]))
print(store.lead("child", "", 3600), flush=True)
sys.stdin.read()
"""


def test_after_a_kill_the_folder_is_free_and_the_epoch_is_over(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        epoch = int(child.stdout.readline())
        with pytest.raises(InUseError, match=f"process {child.pid}"):
            open_store(tmp_path)
        child.send_signal(signal.SIGKILL)
        child.wait()
    store = open_store(tmp_path)
    mine = store.lead("me", "", 3600)
    store.close()
    assert mine == epoch + 1


def test_every_start_has_a_new_epoch(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        store = open_store(tmp_path)
        epochs.append(store.lead("me", "", 3600))
        store.close()
    assert epochs == [1, 2, 3]


def test_only_the_owner_can_read_the_database(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 50)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    store.close()
    assert DATABASE in modes
    assert set(modes.values()) == {0o600}


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(SlicewiseError, match="no folder"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(SlicewiseError, match="name a data folder"):
        open_store(None)


def test_a_file_that_is_not_a_database(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_text("not a database " * 100)
    with pytest.raises(StoreError, match="damaged"):
        open_store(tmp_path)
    (tmp_path / DATABASE).unlink()
    open_store(tmp_path).close()


# Modes


@pytest.mark.parametrize("mode", [WAL_SHARED, WAL_ALONE, ROLLBACK], ids=lambda m: "-".join(m[:2]))
def test_every_mode_is_durable_and_works(
    tmp_path: Path, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = SqliteStore(tmp_path, mode=mode)
    assert f"journal mode {mode.journal}, {mode.why}" in caplog.text
    assert pragma(store, "journal_mode") == mode.journal.lower()
    assert pragma(store, "locking_mode") == mode.locking.lower()
    assert pragma(store, "synchronous") == 2
    fill(store)
    assert verify(store).findings == []
    store.close()


def test_exclusive_locking_prevents_a_second_connection(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, mode=WAL_ALONE)
    assert not list(tmp_path.glob("*-shm"))
    other = sqlite3.connect(tmp_path / DATABASE, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("SELECT * FROM journal")
    other.close()
    store.close()


def test_normal_locking_allows_other_readers(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, mode=WAL_SHARED)
    fill(store, 50)
    other = sqlite3.connect(tmp_path / DATABASE, timeout=0)
    assert other.execute("SELECT max(seq) FROM journal").fetchone() == (store.last_seq(),)
    other.close()
    store.close()


def test_another_program_with_the_database_open_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slicewise.store.sqlite.BUSY_SECONDS", 0.01)
    open_store(tmp_path).close()
    other = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another program has"):
        SqliteStore(tmp_path)
    other.close()
    open_store(tmp_path).close()


@pytest.mark.parametrize(
    ("question", "index"),
    [
        ({"tenant": "acme"}, "journal_by_tenant (tenant=? AND seq<?)"),
        ({"subject": "x"}, "journal_by_subject (subject=? AND seq<?)"),
        ({"subject": "x", "tenant": "acme", "kinds": ("ended",)}, "journal_by_subject (subject=?"),
        ({"kinds": ("ended", "moved")}, "journal_by_kind (kind=? AND seq<?)"),
        ({"tenant": "acme", "kinds": ("ended",)}, "journal_by_tenant (tenant=? AND seq>? AND"),
        ({"tenant": "acme", "kinds": ("token-issued",)}, "journal_by_kind (kind=? AND seq<?)"),
        ({}, "INTEGER PRIMARY KEY (rowid<?)"),
    ],
    ids=str,
)
def test_no_query_of_the_history_reads_the_whole_journal(
    tmp_path: Path, question: dict[str, object], index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path)
    fill(store, 200)
    plans: list[str] = []
    look = store._select

    def explain(wanted: object) -> list[Row]:
        text = str(wanted.compile(store._engine, compile_kwargs={"literal_binds": True}))  # type: ignore[attr-defined]
        with store.session() as connection:
            plans.extend(row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}"))
        return look(wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "_select", explain)
    store.history(before=None, limit=5, **question)  # type: ignore[arg-type]
    store.close()
    assert plans
    assert all(index in plan for plan in plans), plans


# Trouble with the disk


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A disk of 4 MB."""
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no small disk can be mounted here: {mount.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill_up(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def append_often(store: SqlStore, epoch: int) -> None:
    """Append more than the small disk holds, 500 rows at a time."""
    reached = store.last_seq()
    for first in range(reached + 1, reached + 1 + 40 * 500, 500):
        store.append(epoch, rows(first, 500), [])


def test_a_full_disk_is_reported_and_recovered_from(tmp_path: Path) -> None:
    with small_disk(tmp_path):
        store = open_store(tmp_path)
        epoch = store.lead("me", "", 3600)
        assert epoch is not None
        store.append(epoch, rows(1, 10), [])
        ballast = tmp_path / "ballast"
        fill_up(ballast)
        with pytest.raises(StoreError, match="the disk is full"):
            append_often(store, epoch)
        reached = store.last_seq()
        assert reached % 500 == 10
        assert store.rows(0, 100_000) == rows(1, reached)
        with pytest.raises(StoreError, match="the disk is full"):
            append_often(store, epoch)
        reached = store.last_seq()
        ballast.unlink()
        store.append(epoch, rows(reached + 1, 500), [])
        assert verify(store).findings == []
        store.close()
        store = open_store(tmp_path)
        assert store.last_seq() == reached + 500
        store.close()


@pytest.mark.parametrize("mode", [WAL_ALONE, WAL_SHARED, ROLLBACK], ids=lambda m: "-".join(m[:2]))
def test_a_failing_disk_is_reported_and_recovered_from(tmp_path: Path, mode: Mode) -> None:
    store = SqliteStore(tmp_path, mode=mode)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None
    store.append(epoch, rows(1, 10), [])
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20_000, hard))
    try:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"cannot be read or written.*SQLITE_IOERR"):
                store.append(epoch, rows(11, 500), [])
            assert store.last_seq() == 10
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.append(epoch, rows(11, 500), [])
    assert verify(store).findings == []
    store.close()


def test_a_failed_call_leaves_no_open_transaction(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path)
    epoch = store.lead("me", "", 3600)
    assert epoch is not None

    def interrupted() -> None:
        with store.transaction() as connection:
            connection.exec_driver_sql("UPDATE leader SET epoch = 99")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    store.append(epoch, rows(1, 1), [])
    store.close()


def test_an_old_version_of_sqlite_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqlite3.sqlite_version_info", (3, 22, 0))
    with pytest.raises(SlicewiseError, match="too old"):
        open_store(tmp_path)
