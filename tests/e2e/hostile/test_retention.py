"""Retention: old entries leave the journal by way of the archive, and nothing else is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server
from tests.postgres import the_server
from tests.store.busy import START, Busy, fill

from slicewise.control.entries import Ended
from slicewise.control.image import image_of
from slicewise.control.ports import FencedError
from slicewise.control.state import State
from slicewise.control.writer import load
from slicewise.core.errors import SlicewiseError
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
    """A store with images at two places, and an epoch to go on with."""
    busy = fill(store, ROWS, images=3)
    epoch = store.lead("test", "", 60)
    assert epoch is not None
    return busy, epoch


def prune(store: SqlStore, epoch: int, before: float, archive: Path | None = None) -> int:
    return sum(iter(lambda: store.prune(epoch, before, archive), 0))


def oldest_image(store: SqlStore) -> int:
    return next(store.contents().images()).seq


def test_nothing_a_start_needs_is_taken(store: SqlStore, tmp_path: Path) -> None:
    busy, epoch = filled(store)
    state = image_of(busy.office.state)
    assert prune(store, epoch, START) == 0  # nothing is that old
    assert prune(store, epoch, START + 1e9, tmp_path / "archive") == oldest_image(store)
    assert store.span().base == oldest_image(store)
    assert image_of(load(store, State())) == state
    assert verify(store).findings == []
    keys = [key for key, _, _ in busy.answers]
    assert len(store.answers(keys)) == len(set(keys))
    store.keep_image(state)
    with pytest.raises(FencedError):
        store.prune(epoch - 1, START + 1e9, None)


def test_only_what_is_old_enough(store: SqlStore) -> None:
    busy, epoch = filled(store)
    middle = busy.office.rows[oldest_image(store) // 2]
    assert prune(store, epoch, middle.at) < middle.seq
    assert store.span().base == sum(1 for row in busy.office.rows if row.at < middle.at)
    assert verify(store).findings == []  # from the first image on
    assert image_of(load(store, State())) == image_of(busy.office.state)


def test_the_archive_goes_on_where_the_journal_begins(store: SqlStore, tmp_path: Path) -> None:
    """With both, everything can be replayed from the first entry."""
    _, epoch = filled(store)
    archive = tmp_path / "archive"
    assert store.prune(epoch, START + 1e9, archive)
    file = next(archive.iterdir())
    with file.open("ab") as torn:
        torn.write(b'{"seq":')  # as if the process had ended here
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


def test_what_cannot_be_archived_stays(store: SqlStore, tmp_path: Path) -> None:
    _, epoch = filled(store)
    (tmp_path / "archive").write_text("a file")
    with pytest.raises(SlicewiseError, match=r"journal\.archive"):
        store.prune(epoch, START + 1e9, tmp_path / "archive")
    assert store.span().base == 0


def test_archived_twice_and_restored(store: SqlStore, tmp_path: Path) -> None:
    """What was archived and did not leave is not archived again; a restore goes on beside it."""
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
    assert image_of(load(again, State())) == image_of(busy.office.state)
    other.close()
    again.close()


def test_a_service_prunes_and_says_what_is_gone(tmp_path: Path) -> None:
    """A stream from before the cut is refused; the ended are gone; all that lives is there."""
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
        store.keep_image(busy.image())
    old = next(row.entry for row in busy.office.rows if isinstance(row.entry, Ended))
    store.resign(epoch)
    base = oldest_image(store)
    store.close()
    server.start()
    wait_for(lambda: list((tmp_path / "archive").glob("*.jsonl")))
    try:
        wait_for(lambda: server.ask("GET", "/v1/events?after=0", timeout=5)[0] == 410)
        _, said = server.ask("GET", "/v1/events?after=0")
        assert "not kept any more" in said["detail"]
        identity = old.allocation.id
        status, said = server.ask("GET", f"/v1/allocations/{identity}")
        assert status == 404, said
        _, found = server.ask("GET", "/v1/cluster")
        assert found["gpus"] == busy.office.state.cluster.gpus
        out = tmp_path / "out.jsonl"
        slicewise(
            "audit",
            "export",
            "--data",
            server.data,
            "--archive",
            tmp_path / "archive",
            "--out",
            out,
        )
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        assert [line["seq"] for line in lines[1 : base + 2]] == list(range(1, base + 2))
        assert "clean" in slicewise("verify", "--data", server.data)
    finally:
        server.kill()


def wait_for(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if condition():
                return
        except TimeoutError:
            pass  # a stream that goes on, since nothing has left yet
        assert time.monotonic() < give_up
        time.sleep(0.1)


def slicewise(*arguments: object) -> str:
    command = [sys.executable, "-m", "slicewise.cli", *map(str, arguments)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_a_name_that_is_used_again(tmp_path: Path) -> None:
    """Keys belong to a tenant's life, whether or not the journal still knows of the one before."""
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
