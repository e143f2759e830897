"""Event streams after a restore: followers of another history are told, and can begin again."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server

from slicewise.client import Client, ResyncError
from slicewise.control.state import State
from slicewise.k8s.journal import Recent

NODE = {"name": "n1", "model": "A100-80GB", "gpus": 1}


def slicewise(*arguments: object) -> None:
    command = [sys.executable, "-m", "slicewise.cli", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_SECONDS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.start()
    yield made
    made.kill()


def backed_up(server: Server, file: Path) -> None:
    """Take a backup, after which more happens."""
    slicewise("backup", "--data", server.data, file)
    for name in ("lost-1", "lost-2", "lost-3"):
        assert server.ask("POST", "/v1/tenants", {"name": name})[0] == 201


def restored(server: Server, file: Path) -> None:
    """Set the service back to the backup."""
    server.stop()
    token = (server.data / "admin-token").read_text()
    server.data = server.folder / "restored"
    slicewise("restore", "--data", server.data, file)
    (server.data / "admin-token").write_text(token)
    server.start()


def test_another_history_is_refused_with_what_to_do(server: Server, tmp_path: Path) -> None:
    ready = server.readiness()
    assert ready is not None
    backed_up(server, tmp_path / "backup")
    _, cluster = server.ask("GET", "/v1/cluster")
    old = f"{cluster['history']}-{cluster['seq']}"
    restored(server, tmp_path / "backup")
    for asked in (
        {"path": "/v1/events", "headers": {"last-event-id": old}},
        {"path": f"/v1/events?after={old}"},
        {"path": f"/v1/events?after={cluster['history']}-1"},  # also where the numbers are there
        {"path": f"/v1/events?after={cluster['seq']}"},
    ):
        status, said = server.ask("GET", **asked)
        assert status == 410, said
        assert "read the state again" in said["detail"]
    _, now = server.ask("GET", "/v1/cluster")
    assert now["history"] != cluster["history"]
    with (
        Client(server.url, server.admin_token) as client,
        closing(client.events(f"{now['history']}-{now['seq']}")) as events,
    ):
        client.add_tenant("new")
        assert next(events).subject == "new"


def test_a_client_that_follows_is_told(server: Server, tmp_path: Path) -> None:
    backed_up(server, tmp_path / "backup")
    port = server.address[1]
    client = Client(server.url, server.admin_token)
    with client, closing(client.events(0)) as events:
        while next(events).subject != "lost-3":
            pass
        server.stop()
        restore_at(server, tmp_path / "backup", port)
        with pytest.raises(ResyncError, match="another history"):
            next(events)


def test_the_command_goes_on_from_now(server: Server, tmp_path: Path) -> None:
    backed_up(server, tmp_path / "backup")
    port = server.address[1]
    token = server.data / "admin-token"
    command = [sys.executable, "-m", "slicewise.cli", "events", "--after", "0"]
    told = tmp_path / "told"
    with told.open("wb") as out:
        following = subprocess.Popen(
            [*command, "--server", server.url, "--token-file", str(token)],
            stdout=out,
            stderr=subprocess.PIPE,
        )
    try:
        wait_for(lambda: "lost-3" in told.read_text())
        server.stop()
        restore_at(server, tmp_path / "backup", port)
        assert following.stderr is not None
        assert b"another history" in following.stderr.readline()
        numbers = itertools.count()

        def seen() -> bool:  # from now on is from when the command asked again
            server.ask("POST", "/v1/tenants", {"name": f"new-{next(numbers)}"})
            return "new-" in told.read_text()

        wait_for(seen)
    finally:
        following.kill()
        following.communicate()


def restore_at(server: Server, file: Path, port: int) -> None:
    """Restore, and serve from the same address."""
    token = (server.data / "admin-token").read_text()
    server.data = server.folder / "restored"
    slicewise("restore", "--data", server.data, file)
    (server.data / "admin-token").write_text(token)
    server.port = port
    server.start()


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_every_controller_tells_a_history_of_its_own() -> None:
    """In Kubernetes the journal lasts as long as the process."""
    spans = [Recent(State(), lambda: "").span() for _ in range(2)]
    assert spans[0].history != spans[1].history
