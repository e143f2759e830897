"""Fixtures of the end-to-end tests: progress lines, random seeds, servers, a small disk."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.scenario import SETTINGS
from tests.e2e.server import Server
from tests.e2e.small_disk import SmallDisk

Tell = Callable[[str], None]
Open = Callable[..., Server]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Prints a line to the terminal, even if the test passes."""

    def say(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    return say


@pytest.fixture
def seed(tell: Tell) -> int:
    """The seed of all random choices; set SLICEWISE_E2E_SEED to repeat a run."""
    given = os.environ.get("SLICEWISE_E2E_SEED")
    chosen = int(given) if given else 1 if os.environ.get("CI") else secrets.randbits(32)
    tell(f"SLICEWISE_E2E_SEED={chosen}")
    return chosen


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[Open]:
    """Creates servers and kills them after the test."""
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
    """A small tmpfs; skips the test if mounting is not allowed."""
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
        line = keeper.stdout.readline().decode().strip()
        if line != "ready":
            pytest.skip(f"no small disk can be mounted here: {line}")
        yield SmallDisk(keeper.pid, folder)
