"""Retention: old entries move to the archive, and nothing else is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.server import Server, run_command, wait_until
from tests.postgres import the_server
from tests.store.busy import START, Busy, fill

from slicewise.control.ports import FencedError
from slicewise.control.snapshot import snapshot_of
from slicewise.control.state import State
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Ended
from slicewise.runtime.commit_loop import load
from slicewise.store import backup, open_store, restore, verify
from slicewise.store.archive import ArchivedContents
from slicewise.store.sql import SqlStore

ROWS = 700


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    if request.param == "postgresql":
        made = open_store(None, the_server().database())
    else:
        (tmp_path / "data").mkdir()
        made = open_store(tmp_path / "data")
    yield made
    made.close()


def filled(store: SqlStore) -> tuple[Busy, int]:
    """Fill a store with snapshots at two positions, and return an epoch to write with."""
    busy = fill(store, ROWS, snapshots=3)
    epoch = store.lead("test", "", 60)
    assert epoch is not None
    return busy, epoch


def prune(store: SqlStore, epoch: int, before: float, archive: Path | None = None) -> int:
    return sum(iter(lambda: store.prune(epoch, before, archive), 0))


def oldest_snapshot(store: SqlStore) -> int:
    return next(store.contents().snapshots()).seq


def test_entries_needed_for_a_start_are_kept(store: SqlStore, tmp_path: Path) -> None:
    busy, epoch = filled(store)
    state = snapshot_of(busy.office.state)
    assert prune(store, epoch, START) == 0  # nothing is old enough
    assert prune(store, epoch, START + 1e9, tmp_path / "archive") == oldest_snapshot(store)
    assert store.span().base == oldest_snapshot(store)
    assert snapshot_of(load(store, State())) == state
    assert verify(store).findings == []
    keys = [key for key, _, _ in busy.answers]
    assert len(store.answers(keys)) == len(set(keys))
    store.save_snapshot(state)
    with pytest.raises(FencedError):
        store.prune(epoch - 1, START + 1e9, None)


def test_only_old_entries_are_removed(store: SqlStore) -> None:
    busy, epoch = filled(store)
    middle = busy.office.rows[oldest_snapshot(store) // 2]
    assert prune(store, epoch, middle.at) < middle.seq
    assert store.span().base == sum(1 for row in busy.office.rows if row.at < middle.at)
    assert verify(store).findings == []  # from the first snapshot on
    assert snapshot_of(load(store, State())) == snapshot_of(busy.office.state)


def test_the_archive_ends_where_the_journal_begins(store: SqlStore, tmp_path: Path) -> None:
    """Archive and journal together can be replayed from the first entry."""
    _, epoch = filled(store)
    archive = tmp_path / "archive"
    assert store.prune(epoch, START + 1e9, archive)
    file = next(archive.iterdir())
    with file.open("ab") as torn:
        torn.write(b'{"seq":')  # as after a crash
    prune(store, epoch, START + 1e9, archive)
    report = verify(ArchivedContents(store.contents(), archive))
    assert (report.findings, report.rows) == ([], ROWS)
    file.write_bytes(file.read_bytes().replace(b'"acme"', b'"blue"', 1))
    assert any(
        "is not what was written" in finding
        for finding in verify(ArchivedContents(store.contents(), archive)).findings
    )
    with pytest.raises(SlicewiseError, match="holds no archive of the entries up to"):
        ArchivedContents(store.contents(), tmp_path)


def test_entries_that_cannot_be_archived_are_kept(store: SqlStore, tmp_path: Path) -> None:
    _, epoch = filled(store)
    (tmp_path / "archive").write_text("a file")
    with pytest.raises(SlicewiseError, match=r"journal\.archive"):
        store.prune(epoch, START + 1e9, tmp_path / "archive")
    assert store.span().base == 0


def test_interrupted_archiving_and_restore(store: SqlStore, tmp_path: Path) -> None:
    """Entries that were archived but not removed are not archived again; a restore starts a new
    archive."""
    busy, epoch = filled(store)
    archive = tmp_path / "archive"
    backup(store, tmp_path / "backup")
    prune(store, epoch, START + 1e9, archive)
    (tmp_path / "restored").mkdir()
    other = open_store(tmp_path / "restored")
    restore(tmp_path / "backup", other)
    epoch = other.lead("test", "", 60) or 0
    prune(other, epoch, START + 1e9, archive)
    report = verify(ArchivedContents(other.contents(), archive))
    assert (report.findings, report.rows) == ([], ROWS)
    backup(other, tmp_path / "pruned")
    (tmp_path / "again").mkdir()
    again = open_store(tmp_path / "again")
    restore(tmp_path / "pruned", again)
    assert verify(again).findings == []
    assert snapshot_of(load(again, State())) == snapshot_of(busy.office.state)
    other.close()
    again.close()


def test_a_service_prunes_and_reports_removed_positions(tmp_path: Path) -> None:
    """Stream positions before the cut are refused; only active allocations remain."""
    settings = ("journal.days=1", f"journal.archive={tmp_path / 'archive'}")
    server = Server(tmp_path, settings=(*settings, "clock.max_gap_hours=1000"))
    server.data.mkdir()
    store = open_store(server.data)
    busy = Busy()
    busy.office.now = time.time() - 10 * 86400
    epoch = store.lead("test", "", 60)
    assert epoch is not None
    written = 0
    for rows in (200, 400, 420):
        busy.work(rows)
        store.append(epoch, busy.office.rows[written:], [])
        written = len(busy.office.rows)
        store.save_snapshot(busy.snapshot())
    old = next(row.entry for row in busy.office.rows if isinstance(row.entry, Ended))
    store.resign(epoch)
    base = oldest_snapshot(store)
    store.close()
    server.start()
    wait_until(lambda: list((tmp_path / "archive").glob("*.jsonl")))
    try:
        wait_until(lambda: _is_gone(server, "/v1/events?after=0"))
        _, content = server.ask("GET", "/v1/events?after=0")
        assert "no longer kept" in content["detail"]
        identity = old.allocation.id
        status, content = server.ask("GET", f"/v1/allocations/{identity}")
        assert status == 404, content
        _, found = server.ask("GET", "/v1/cluster")
        assert found["gpus"] == busy.office.state.cluster.gpus
        out = tmp_path / "out.jsonl"
        server.backup(tmp_path / "backup")
        run_command(
            "audit",
            "export",
            "--backup",
            tmp_path / "backup",
            "--archive",
            tmp_path / "archive",
            "--out",
            out,
        )
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["seq"] for line in lines[1 : base + 2]] == list(range(1, base + 2))
        assert "clean" in run_command("verify", "--backup", tmp_path / "backup")
    finally:
        server.kill()


def _is_gone(server: Server, stream: str) -> bool:
    try:
        return server.ask("GET", stream, timeout=5)[0] == 410
    except TimeoutError:
        return False  # the stream continues, because nothing was removed yet


def test_a_reused_tenant_name(tmp_path: Path) -> None:
    """Idempotency keys belong to one tenant, even if its name is reused and the old entries are
    gone."""
    server = Server(tmp_path)
    server.start()
    try:
        node = {"name": "n1", "model": "A100-80GB", "gpus": 2}
        assert server.ask("POST", "/v1/nodes", node)[0] == 201
        seen = []
        for _ in range(2):
            assert server.ask("POST", "/v1/tenants", {"name": "acme"})[0] == 201
            asked = {"profile": "1g.10gb", "tenant": "acme"}
            same = {"idempotency-key": "k"}
            status, made = server.ask("POST", "/v1/allocations", asked, headers=same)
            assert status == 201
            assert server.ask("POST", "/v1/allocations", asked, headers=same)[1] == made
            seen.append(made["id"])
            assert server.ask("DELETE", f"/v1/allocations/{made['id']}")[0] == 200
            assert server.ask("DELETE", "/v1/tenants/acme")[0] == 200
        assert seen[0] != seen[1]
    finally:
        server.kill()
