"""An empty database is a first start only if there was none before, or on command."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.server import Server, run_command
from tests.postgres import the_server

from slicewise.server.bootstrap import MARKER
from slicewise.store.sqlite import DATABASE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.kill()


def refused(server: Server) -> str:
    """Start a server that must fail, and return its message."""
    before = sorted(path.name for path in server.data.glob("*.db"))
    server.launch()
    assert server.wait_until_exit() == 2
    assert sorted(path.name for path in server.data.glob("*.db")) == before
    return server.last_lines().splitlines()[-1]


def used_before(server: Server) -> None:
    server.start()
    assert server.ask("POST", "/v1/tenants", {"name": "acme"})[0] == 201
    server.stop()


def test_a_lost_database_is_refused(server: Server) -> None:
    used_before(server)
    server.start()  # as before
    server.stop()
    for name in (MARKER, "admin-token"):  # one of the two files is enough
        aside = server.folder / name
        (server.data / name).rename(aside)
        for file in server.data.glob(f"{DATABASE}*"):
            file.rename(server.folder / file.name)
        content = refused(server)
        assert "its database is empty" in content
        assert "mount the volume" in content
        assert "restore a backup" in content
        assert "--init" in content
        aside.rename(server.data / name)
        for file in server.folder.glob(f"{DATABASE}*"):
            file.rename(server.data / file.name)
    server.start()
    assert "acme" in str(server.ask("GET", "/v1/tenants")[1])


def test_a_new_history_on_command(server: Server) -> None:
    used_before(server)
    for file in server.data.glob(f"{DATABASE}*"):
        file.unlink()
    server.options = ["--init"]
    server.start()
    assert "acme" not in str(server.ask("GET", "/v1/tenants")[1])
    server.stop()
    assert "already holds one" in refused(server)
    server.options = []
    server.start()


def test_an_unmounted_volume_is_refused(server: Server) -> None:
    """An empty folder has no marker, so a setting outside of it states what is expected."""
    server.settings = ("require_history=true",)
    assert "for the first start, add --init" in refused(server)
    server.options = ["--init"]
    used_before(server)
    server.options = []
    lived_there = server.data
    server.start()
    server.stop()
    server.data = server.folder / "mount-point"
    server.data.mkdir()
    assert "require_history is set" in refused(server)
    server.data = lived_there
    server.start()


def test_another_database_is_refused(server: Server) -> None:
    """With PostgreSQL, the marker is in the data folder."""
    server.database = right = the_server().database()
    used_before(server)
    server.database = the_server().database()
    assert "its database is empty" in refused(server)
    other = Server(server.folder / "other", database=server.database)
    try:
        used_before(other)
        content = refused(server)
        assert "belongs to" in content
        assert f"remove {server.data / MARKER}" in content
    finally:
        other.kill()
    server.database = right
    server.start()


def test_a_restored_history_is_accepted(server: Server, tmp_path: Path) -> None:
    used_before(server)
    run_command("backup", "--data", server.data, tmp_path / "backup")
    for file in server.data.glob(f"{DATABASE}*"):
        file.unlink()
    run_command("restore", "--data", server.data, tmp_path / "backup")
    before = (server.data / MARKER).read_text()
    server.start()
    assert "acme" in str(server.ask("GET", "/v1/tenants")[1])
    assert (server.data / MARKER).read_text() != before
    server.stop()
    shutil.rmtree(server.data)
    server.start()  # everything is gone: an ordinary first start
