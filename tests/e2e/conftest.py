"""What the end-to-end tests share: where to say what was counted, and servers that surely end."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.server import Server
from tests.e2e.small_disk import SmallDisk
from tests.e2e.stage import SETTINGS

Tell = Callable[[str], None]
Open = Callable[..., Server]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Says a line to whoever runs the tests, also when nothing failed."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    return say


@pytest.fixture
def seed(tell: Tell) -> int:
    """Where all chance comes from; set SLICEWISE_E2E_SEED to have the same again."""
    given = os.environ.get("SLICEWISE_E2E_SEED")
    chosen = int(given) if given else 1 if os.environ.get("CI") else secrets.randbits(32)
    tell(f"SLICEWISE_E2E_SEED={chosen}")
    return chosen


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[Open]:
    """Makes servers, and ends them after the test."""
    made: list[Server] = []

    def make(
        name: str, database: str | None = None, settings: tuple[str, ...] = SETTINGS
    ) -> Server:
        server = Server(tmp_path / name, database=database, settings=settings)
        made.append(server)
        return server

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A small disk; needs to be allowed to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    script = 'mount -t tmpfs -o size=48m,mode=700 slicewise-test "$0" && echo ready && exec cat'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, str(folder)]
    try:
        keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed, so there is no small disk")
    with keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.readline().decode().strip()
        if said != "ready":
            pytest.skip(f"no small disk can be mounted here: {said}")
        yield SmallDisk(keeper.pid, folder)
