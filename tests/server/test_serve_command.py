"""`slicewise serve` in a separate process, on SQLite, stopped by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from slicewise.cli.main import exit_status


@contextmanager
def served(folder: Path, *options: str, ends: int = signal.SIGTERM) -> Iterator[httpx.Client]:
    """A service on a folder, and a client with its admin token."""
    command = [sys.executable, "-m", "slicewise.cli", "serve", "--data", str(folder)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLICEWISE_")}
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("slicewise: leading at http://127.0.0.1:"), line
        assert str(folder / "admin-token") in line
        token = (folder / "admin-token").read_text().strip()
        url = line.split(" at ")[1].split(",")[0]
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}) as client:
            yield client
        process.send_signal(ends)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert out == ""
        assert "Traceback" not in err
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_serve_stop_and_restart(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with served(folder) as client:
        assert client.get("/readyz").json()["role"] == "leading"
        node = client.post("/v1/nodes", json={"name": "n1", "model": "a100", "gpus": 2})
        assert node.status_code == 201
        made = client.post(
            "/v1/allocations", json={"profile": "3g.40gb"}, headers={"idempotency-key": "k"}
        )
        assert made.status_code == 201
        gone = client.post("/v1/allocations", json={"profile": "1g.10gb"}).json()["id"]
        ended = client.delete(f"/v1/allocations/{gone}").json()
        before = client.get("/v1/cluster?gpus=true").json()
    assert (folder / "admin-token").stat().st_mode & 0o777 == 0o600
    with served(folder, "--set", "log.format=json", ends=signal.SIGINT) as client:
        assert client.get("/v1/cluster?gpus=true").json() == before
        again = client.post(
            "/v1/allocations", json={"profile": "3g.40gb"}, headers={"idempotency-key": "k"}
        )
        assert again.headers["idempotency-replayed"] == "true"
        assert again.json() == made.json()
        assert client.delete(f"/v1/allocations/{gone}").json() == ended
        with client.stream("GET", "/v1/events?after=0") as stream:
            lines = stream.iter_lines()
            seen = [next(lines) for _ in range(6)]
        history = client.get("/readyz").json()["history"]
        assert f"id: {history}-1" in seen
        assert len(client.get("/v1/audit").json()["events"]) == 7


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    data = ["--data", str(tmp_path)]
    for arguments, problem in (
        ([], "data is missing"),
        ([*data, "--listen", "0.0.0.0:0"], "listen_without_tls"),
        ([*data, "--set", "x"], "--set 'x' must be KEY=VALUE"),
        (["--data", str(tmp_path / "file" / "x")], "data: "),
        ([*data, "--config", str(tmp_path / "no")], "cannot be read"),
        ([*data, "--policy", "mfy"], "policy (flag): unknown policy 'mfy'"),
        ([*data, "--listen", "127.0.0.1:0", "--database", "what://ever"], "what"),
    ):
        assert exit_status(["serve", *arguments]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("slicewise: error: ")
        assert problem in said
