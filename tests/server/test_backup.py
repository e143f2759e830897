"""Backups of a running service: GET /v1/backup."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.harness import Harness
from tests.store.busy import fill

from slicewise.control.ports import StoreError
from slicewise.core.errors import SlicewiseError
from slicewise.server.routes.backup import MAX_BACKUPS
from slicewise.store import open_backup, open_store, restore, save_backup, verify
from slicewise.store.contents import StoreContents, StoredRow
from slicewise.store.sql import SqlStore

PATH = "/v1/backup"


class Reader:
    """A client that takes one piece at a time; the server waits until it has."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=1)
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if not self.left.is_set():
            await self._messages.put(message)

    async def piece(self) -> bytes:
        """The next piece of the body, empty at the end."""
        message = await self._messages.get()
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            return await self.piece()
        return bytes(message["body"])

    async def rest(self) -> bytes:
        """The rest of the body."""
        whole = b""
        while piece := await self.piece():
            whole += piece
        return whole


@asynccontextmanager
async def reading(harness: Harness, token: str = "") -> AsyncIterator[Reader]:
    """Start a backup; disconnect at the end, complete or not."""
    reader = Reader()
    scope = {
        "type": "http",
        "method": "GET",
        "path": PATH,
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {token or harness.admin}".encode())],
    }
    task = asyncio.create_task(harness.service.app(scope, reader.receive, reader.send))
    try:
        yield reader
    finally:
        reader.left.set()
        while not task.done():
            if not reader._messages.empty():
                reader._messages.get_nowait()
            await asyncio.sleep(0)
        await task


async def ask(
    harness: Harness, method: str, path: str, body: object = None, token: str = ""
) -> httpx.Response:
    """A request of the admin, or with another token, while a backup is being read."""
    transport = httpx.ASGITransport(harness.service.app)
    headers = {"authorization": f"Bearer {token or harness.admin}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, json=body, headers=headers)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    """A store on SQLite with some history."""
    (tmp_path / "store").mkdir()
    made = open_store(tmp_path / "store")
    fill(made, 600)
    yield made
    made.close()


@pytest.fixture
def harness(tmp_path: Path, store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    """A service on that store, which sends small pieces."""
    monkeypatch.setattr("slicewise.store.backup_file.PIECE_BYTES", 500)
    made = Harness(tmp_path, store=store)
    yield made
    made.close()


def test_a_backup_can_be_verified_and_restored(
    harness: Harness, store: SqlStore, tmp_path: Path
) -> None:
    answer = harness.get(PATH)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/gzip"
    file = tmp_path / "backup"
    assert save_backup([answer.content], file) == store.last_seq()
    with open_backup(file) as contents:
        assert verify(contents).findings == []
    (tmp_path / "other").mkdir()
    other = open_store(tmp_path / "other")
    restore(file, other)
    assert other.rows(0, 10_000) == store.rows(0, 10_000)
    other.close()


def test_commits_continue_during_a_slow_backup(harness: Harness, tmp_path: Path) -> None:
    async def read() -> bytes:
        async with reading(harness) as reader:
            begun = await reader.piece()
            for number in range(3):
                body = {"name": f"during-{number}", "model": "A100-80GB", "gpus": 1}
                assert (await ask(harness, "POST", "/v1/nodes", body)).status_code == 201
            return begun + await reader.rest()

    whole = harness.run(read())
    save_backup([whole], tmp_path / "backup")
    with open_backup(tmp_path / "backup") as contents:
        assert verify(contents).findings == []


def test_concurrent_backups_are_limited(harness: Harness) -> None:
    async def crowd() -> None:
        async with reading(harness) as one, reading(harness) as other:
            await one.piece()
            await other.piece()
            refused = await ask(harness, "GET", PATH)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "10"

    assert MAX_BACKUPS == 2
    harness.run(crowd())
    assert harness.service.context.backups == 0  # both readers left early
    assert harness.get(PATH).status_code == 200
    assert harness.service.context.backups == 0
    assert harness.call("HEAD", PATH).status_code == 200
    assert harness.service.context.backups == 0


def test_a_revoked_token_ends_a_backup(harness: Harness, tmp_path: Path) -> None:
    issued = harness.post("/v1/tokens", {"role": "admin"}).json()

    async def read() -> bytes:
        async with reading(harness, issued["token"]) as reader:
            begun = await reader.piece()
            revoked = await ask(harness, "DELETE", f"/v1/tokens/{issued['id']}")
            assert revoked.status_code == 200
            return begun + await reader.rest()

    with pytest.raises(SlicewiseError, match="cut short"):
        save_backup([harness.run(read())], tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_a_token_revoked_before_the_first_piece_leaves_no_backup_open(harness: Harness) -> None:
    issued = harness.post("/v1/tokens", {"role": "admin"}).json()
    context = harness.service.context

    async def read() -> None:
        async with context.journal_lock.hold("another reader"):
            begun = asyncio.create_task(ask(harness, "GET", PATH, token=issued["token"]))
            while not context.backups:
                await asyncio.sleep(0)
            revoked = await ask(harness, "DELETE", f"/v1/tokens/{issued['id']}")
            assert revoked.status_code == 200
        assert (await begun).status_code == 401

    harness.run(read())
    assert context.backups == 0


def test_a_failing_database_aborts_a_backup(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = StoreContents.rows

    def broken(self: object) -> list[object]:
        raise StoreError("the disk is gone")

    def broken_later(self: StoreContents) -> Iterator[StoredRow]:
        yield from islice(rows(self), 550)
        broken(self)

    with monkeypatch.context() as patch:
        patch.setattr("slicewise.store.sql.StoreContents.rows", broken_later)
        cut = harness.get(PATH)
        assert cut.status_code == 200
        with pytest.raises(SlicewiseError, match="cut short"):
            save_backup([cut.content], tmp_path / "backup")
        patch.setattr("slicewise.store.sql.StoreContents.snapshots", broken)
        assert harness.get(PATH).status_code == 503
    assert harness.service.context.backups == 0
    save_backup([harness.get(PATH).content], tmp_path / "backup")


def test_a_store_without_backups_is_refused(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    assert harness.get(PATH).status_code == 409
    assert harness.service.context.backups == 0
    harness.close()
