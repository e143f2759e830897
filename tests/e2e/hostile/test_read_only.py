"""`verify` and `backup` work on a read-only volume and do not change it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server

from slicewise.store import open_backup, verify
from slicewise.store.sqlite import DATABASE

MOUNT = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


@pytest.fixture(params=["stopped", "killed"])
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The data folder of a service that stopped cleanly, or was killed and left a log."""
    server = Server(tmp_path / "server")
    server.start()
    assert server.ask("POST", "/v1/tenants", {"name": "acme"})[0] == 201
    if request.param == "stopped":
        server.stop()
    else:
        server.kill()
    log = server.data / f"{DATABASE}-wal"
    assert (log.exists() and log.stat().st_size > 0) == (request.param == "killed")
    yield server.data
    server.data.chmod(0o700)


def commands(data: Path, file: Path) -> Iterator[list[str]]:
    for command in (["verify"], ["backup", str(file)]):
        yield [sys.executable, "-m", "slicewise.cli", *command, "--data", str(data)]


def contents(data: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.iterdir() if path.is_file()}


def check(file: Path) -> None:
    """Check that the backup has every acknowledged write."""
    with open_backup(file) as backup:
        report = verify(backup)
    assert report.clean
    assert report.rows >= 3


def test_a_read_only_mount(data: Path, tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed, so nothing can be mounted read-only")
    here = ["unshare", "--mount", "--propagation", "private", "sh", "-c", MOUNT, str(data)]
    tried = subprocess.run([*here, "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"nothing can be mounted read-only here: {tried.stderr.strip()}")
    assert subprocess.run([*here, "touch", str(data / "x")], check=False).returncode
    before = contents(data)
    for command in commands(data, tmp_path / "backup"):
        run([*here, *command])
    assert contents(data) == before
    check(tmp_path / "backup")


READ = """
import os, sys
from pathlib import Path
import sqlalchemy.dialects.sqlite.pysqlite
from slicewise.store import backup, open_contents, verify
user, data, file = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
if os.geteuid() == 0:  # who may write anywhere; the files of the program are read by now
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
with open_contents(data) as contents:
    assert verify(contents).clean
with open_contents(data) as contents:
    print(backup(contents, file), "rows of the journal")
"""


def test_a_folder_of_another_owner(data: Path) -> None:
    """A user with read access can verify it and take a backup."""
    with (
        tempfile.TemporaryDirectory() as name
    ):  # pytest's folders are not accessible to other users
        folder, user = Path(name), os.getuid()
        there, out = folder / "data", folder / "out"
        there.mkdir()
        for path in data.iterdir():
            if path.is_file():  # a killed service leaves a socket
                shutil.copy(path, there)
        out.mkdir()
        if user == 0:
            user = pwd.getpwnam("nobody").pw_uid
            os.chown(out, user, -1)
            folder.chmod(0o755)
            for path in there.iterdir():
                path.chmod(0o644)
        there.chmod(0o555)
        before = contents(there)
        run([sys.executable, "-c", READ, str(user), str(there), str(out / "backup")])
        assert contents(there) == before
        check(out / "backup")
        there.chmod(0o755)


def run(command: list[str]) -> None:
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "clean" in done.stdout or "rows of the journal" in done.stdout
