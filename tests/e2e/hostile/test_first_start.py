"""An empty database is a first start only where nothing was before, or on purpose."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server
from tests.postgres import the_server

from slicewise.service.beginning import MARKER
from slicewise.store.sqlite import DATABASE


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.kill()


def refused(server: Server) -> str:
    """Let it start in vain, and return what it says."""
    before = sorted(path.name for path in server.data.glob("*.db"))
    server.launch()
    assert server.wait_until_exit() == 2
    assert sorted(path.name for path in server.data.glob("*.db")) == before
    return server.last_lines().splitlines()[-1]


def lived(server: Server) -> None:
    server.start()
    assert server.ask("POST", "/v1/tenants", {"name": "acme"})[0] == 201
    server.stop()


def test_a_database_that_is_gone(server: Server) -> None:
    lived(server)
    server.start()  # as ever
    server.stop()
    for name in (MARKER, "admin-token"):  # one trace is enough
        aside = server.folder / name
        (server.data / name).rename(aside)
        for file in server.data.glob(f"{DATABASE}*"):
            file.rename(server.folder / file.name)
        said = refused(server)
        assert "its database is empty" in said
        assert "mount the volume" in said
        assert "restore a backup" in said
        assert "--init" in said
        aside.rename(server.data / name)
        for file in server.folder.glob(f"{DATABASE}*"):
            file.rename(server.data / file.name)
    server.start()
    assert "acme" in str(server.ask("GET", "/v1/tenants")[1])


def test_a_new_history_on_purpose(server: Server) -> None:
    lived(server)
    for file in server.data.glob(f"{DATABASE}*"):
        file.unlink()
    server.options = ["--init"]
    server.start()
    assert "acme" not in str(server.ask("GET", "/v1/tenants")[1])
    server.stop()
    assert "holds one already" in refused(server)
    server.options = []
    server.start()


def test_a_volume_that_is_not_mounted(server: Server) -> None:
    """An empty folder tells nothing, so the settings outside of it say what is expected."""
    server.settings = ("require_history=true",)
    assert "for the first start, add --init" in refused(server)
    server.options = ["--init"]
    lived(server)
    server.options = []
    lived_there = server.data
    server.start()
    server.stop()
    server.data = server.folder / "mount-point"
    server.data.mkdir()
    assert "require_history is set" in refused(server)
    server.data = lived_there
    server.start()


def test_another_database(server: Server) -> None:
    """PostgreSQL has no folder, but the service does."""
    server.database = right = the_server().database()
    lived(server)
    server.database = the_server().database()
    assert "its database is empty" in refused(server)
    other = Server(server.folder / "other", database=server.database)
    try:
        lived(other)
        said = refused(server)
        assert "belongs to" in said
        assert f"remove {server.data / MARKER}" in said
    finally:
        other.kill()
    server.database = right
    server.start()


def test_a_restored_history_is_accepted(server: Server, tmp_path: Path) -> None:
    lived(server)
    run("backup", "--data", server.data, tmp_path / "backup")
    for file in server.data.glob(f"{DATABASE}*"):
        file.unlink()
    run("restore", "--data", server.data, tmp_path / "backup")
    before = (server.data / MARKER).read_text()
    server.start()
    assert "acme" in str(server.ask("GET", "/v1/tenants")[1])
    assert (server.data / MARKER).read_text() != before
    server.stop()
    shutil.rmtree(server.data)
    server.start()  # all of it gone: a first start like any other


def run(*arguments: object) -> None:
    command = [sys.executable, "-m", "slicewise.cli", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
