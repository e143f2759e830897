"""Damaged databases: a start serves exactly what was written, or refuses."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest
from tests.e2e.server import Server
from tests.postgres import the_server
from tests.store.busy import fill

from slicewise.control.ports import DAMAGED, DamagedError, IdempotencyKey, StoreError
from slicewise.control.snapshot import Snapshot, snapshot_of
from slicewise.control.state import State
from slicewise.core.errors import SlicewiseError
from slicewise.runtime.commit_loop import load
from slicewise.store import backup, open_store, restore, verify
from slicewise.store.sqlite import DATABASE

FLIPS = 40
ROWS = 300


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a stopped service, with snapshots at two positions of its journal."""
    folder = tmp_path_factory.mktemp("original")
    store = open_store(folder)
    fill(store, ROWS, snapshots=3)
    store.close()
    return folder


@pytest.fixture(scope="module")
def state(original: Path) -> Snapshot:
    """The state of that folder."""
    store = open_store(original)
    state = snapshot_of(load(store, State()))
    store.close()
    return state


def copied(original: Path, folder: Path) -> Path:
    shutil.copytree(original, folder, ignore=shutil.ignore_patterns("*.sock", "*.lock"))
    return folder


def started(folder: Path | None, database: str | None = None) -> tuple[Snapshot, tuple[str, ...]]:
    """Return the state that a service would serve from there, and its warnings."""
    store = open_store(folder, database)
    try:
        return snapshot_of(load(store, State())), store.warnings
    finally:
        store.close()


def findings(folder: Path | None, database: str | None = None) -> list[str]:
    store = open_store(folder, database)
    try:
        return verify(store).findings
    finally:
        store.close()


# A real service


def test_two_changed_bytes_of_the_last_snapshot(tmp_path: Path) -> None:
    """The service loads the previous snapshot, warns, and serves what was written."""
    server = Server(tmp_path)
    server.start()
    node = {"name": "n1", "model": "A100-80GB", "gpus": 1}
    assert server.ask("POST", "/v1/nodes", node)[0] == 201
    server.stop()
    server.start()
    asked = {"tenant": "default", "profile": "3g.40gb"}
    assert server.ask("POST", "/v1/allocations", asked)[0] == 201
    _, before = server.ask("GET", "/v1/allocations")
    server.stop()
    start = before["allocations"][0]["instances"][0]["start"]
    old, new = (f'"start":{start}', f'"start":{4 - start}')  # a legal but wrong start
    change(
        server.data,
        None,
        f"UPDATE snapshots SET data = CAST(replace(CAST(data AS TEXT), '{old}', '{new}') AS BLOB) "
        f"WHERE seq = (SELECT max(seq) FROM snapshots) AND instr(data, CAST('{old}' AS BLOB))",
    )
    server.start()
    assert server.ask("GET", "/v1/allocations") == (200, before)
    ready = server.readiness()
    assert ready is not None
    assert ready["ready"]
    assert [warning for warning in ready["warnings"] if "snapshot at entry" in warning]
    server.stop()  # writes a new snapshot
    change(server.data, None, "UPDATE snapshots SET data = substr(data, 2)")
    change(server.data, None, "UPDATE journal SET origin = 'elsewhere' WHERE seq = 2")
    content = (server.data / DATABASE).read_bytes()
    server.launch()
    assert server.wait_until_exit() == 2
    last = server.last_lines().splitlines()[-1]
    assert "entry 2 of the journal is not what was written" in last
    assert "slicewise verify" in last
    assert "restore a backup" in last
    assert (server.data / DATABASE).read_bytes() == content
    server.kill()


# Systematic damage


def flips(content: bytes) -> Iterator[tuple[int, int]]:
    """Return bits to flip: at least one on every kind of page, the others at random."""
    chance = random.Random(14)
    pages: dict[int, list[int]] = {}
    for page in range(len(content) // 4096):
        at = 100 if page == 0 else page * 4096
        pages.setdefault(content[at], []).append(page)
    for kind in pages.values():
        for page in chance.sample(kind, min(3, len(kind))):
            yield page * 4096 + chance.randrange(4096), chance.randrange(8)
    while True:
        yield chance.randrange(len(content)), chance.randrange(8)


def test_flipped_bits(original: Path, state: Snapshot, tmp_path: Path) -> None:
    """Each start serves what was written or refuses, and `verify` detects every change."""
    content = (original / DATABASE).read_bytes()
    before = logical(original)
    refused = served = 0
    for number, (at, bit) in zip(range(FLIPS), flips(content), strict=False):
        folder = tmp_path / str(number)
        folder.mkdir()
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        (folder / DATABASE).write_bytes(damaged)
        try:
            found, _ = started(folder)
        except SlicewiseError:
            refused += 1
        else:
            served += 1
            assert found == state, (at, bit)
        for rest in folder.glob(f"{DATABASE}-*"):  # what the start has written beside the file
            rest.unlink()
        (folder / DATABASE).write_bytes(damaged)
        after = logical(folder)
        if after != before:
            with suppress(SlicewiseError):  # it cannot be opened
                assert findings(folder), (at, bit)
    assert refused + served == FLIPS
    assert served


def logical(folder: Path) -> object:
    """Return the logical content of the database, or None if it cannot be read."""
    driver = sqlite3.connect(folder / DATABASE)
    try:
        return [
            sorted(map(repr, driver.execute(f"SELECT * FROM {table}")))
            for table in ("journal", "answers", "snapshots", "head", "history")
        ]
    except (sqlite3.Error, UnicodeDecodeError):
        return None
    finally:
        driver.close()


DAMAGE = {
    "a snapshot": "UPDATE snapshots SET chain = checksum, checksum = chain",
    "a row changed": "UPDATE journal SET actor = 'another' WHERE seq = 290",
    "a row moved in time": "UPDATE journal SET at = at + 1 WHERE seq = 290",
    "a tail cut off": "DELETE FROM journal WHERE seq > 280",
    "the whole tail cut off": "DELETE FROM journal WHERE seq > (SELECT max(seq) FROM snapshots)",
    "a hole": "DELETE FROM journal WHERE seq = 290",
    "two rows swapped": "UPDATE journal SET data = (SELECT data FROM journal AS other "
    "WHERE other.seq = 581 - journal.seq) WHERE seq IN (290, 291)",
    "the head": "UPDATE head SET chain = (SELECT chain FROM journal WHERE seq = 299)",
    "the beginning": "UPDATE history SET name = 'another'",
    "an old row": "UPDATE journal SET data = replace(data, 'acme', 'blue') WHERE seq = 1",
    "an answer": "UPDATE answers SET status = 200 WHERE seq = (SELECT max(seq) FROM answers)",
    "a missing head": "UPDATE head SET seq = 299",
}
SERVED = {"a snapshot", "an old row", "an answer"}
"""Damage that a start tolerates or does not read."""


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_changed_contents(
    original: Path, state: Snapshot, tmp_path: Path, kind: str, damage: str
) -> None:
    folder, database = place(original, tmp_path, kind)
    change(folder, database, DAMAGE[damage])
    if damage in SERVED:
        assert started(folder, database)[0] == state
    else:
        with pytest.raises(DamagedError, match=r"run 'slicewise verify'.*restore a backup"):
            started(folder, database)
    assert findings(folder, database)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_row_of_another_history(
    original: Path, state: Snapshot, tmp_path: Path, kind: str
) -> None:
    """The rows are identical in content, but belong to another history."""
    other = tmp_path / "other"
    other.mkdir()
    store = open_store(other)
    fill(store, ROWS, snapshots=3)  # the same rows in another history
    rows = [row for row in store.contents().rows() if row.seq in (290, 291)]
    store.close()
    folder, database = place(original, tmp_path, kind)
    for row in rows:
        hexed = f"'{row.chain.hex()}'"
        chain = f"X{hexed}" if kind == "sqlite" else f"decode({hexed}, 'hex')"
        change(folder, database, f"UPDATE journal SET chain = {chain} WHERE seq = {row.seq}")
    with pytest.raises(DamagedError, match="entry 290 of the journal is not what was written"):
        started(folder, database)
    found = findings(folder, database)
    assert any("entry 290 is not what was written" in finding for finding in found)
    assert any("entry 292 is not what was written" in finding for finding in found)


def place(original: Path, tmp_path: Path, kind: str) -> tuple[Path | None, str | None]:
    """Copy the original to a database of this kind."""
    if kind == "sqlite":
        return copied(original, tmp_path / "copy"), None
    source = open_store(copied(original, tmp_path / "copy"))
    backup(source, tmp_path / "backup")
    source.close()
    database = the_server().database()
    target = open_store(None, database)
    restore(tmp_path / "backup", target)
    target.close()
    return None, database


def change(folder: Path | None, database: str | None, statement: str) -> None:
    if database is not None:
        with psycopg.connect(database, autocommit=True) as connection:
            assert connection.execute(statement.encode()).rowcount > 0
        return
    assert folder is not None
    driver = sqlite3.connect(folder / DATABASE)
    assert driver.execute(statement).rowcount > 0
    driver.commit()
    driver.close()


def test_a_damaged_answer_is_not_repeated(original: Path, tmp_path: Path) -> None:
    folder, _ = place(original, tmp_path, "sqlite")
    assert folder is not None
    store = open_store(folder)
    keys = [IdempotencyKey(answer.tenant, answer.key) for answer in store.contents().answers()]
    store.close()
    change(folder, None, "UPDATE answers SET body = X'7B7D'")
    store = open_store(folder)
    found = store.answers(keys)
    assert len(found) == len(keys) > 0
    assert set(found.values()) == {DAMAGED}
    store.close()


def test_a_request_with_a_damaged_answer_is_not_carried_out_again(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        node = {"name": "n1", "model": "A100-80GB", "gpus": 1}
        assert server.ask("POST", "/v1/nodes", node)[0] == 201
        asked = {"tenant": "default", "profile": "1g.10gb"}
        key = {"idempotency-key": "k"}
        assert server.ask("POST", "/v1/allocations", asked, headers=key)[0] == 201
        server.stop()
        change(server.data, None, "UPDATE answers SET status = 200 WHERE key = 'k'")
        server.start()
        status, content = server.ask("POST", "/v1/allocations", asked, headers=key)
        assert status == 500
        assert "is damaged" in content["detail"]
        assert server.ask("GET", "/v1/allocations")[1]["total"] == 1
        assert server.ask("POST", "/v1/allocations", asked)[0] == 201  # other requests are served
    finally:
        server.kill()


def test_a_follower_detects_damage(original: Path, tmp_path: Path) -> None:
    """New rows are verified against those read before."""
    _, database = place(original, tmp_path, "postgresql")
    store, reader = open_store(None, database), open_store(None, database)
    rows = reader.rows(0, ROWS)
    assert len(rows) == ROWS
    change(
        None,
        database,
        f"UPDATE journal SET chain = (SELECT chain FROM journal WHERE seq = 1) WHERE seq = {ROWS}",
    )
    with pytest.raises(StoreError, match=f"entry {ROWS} of the journal has changed"):
        reader.rows(ROWS, 10)
    store.close()
    reader.close()
