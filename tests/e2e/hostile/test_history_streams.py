"""Event streams after a restore: a position of another history is refused, and clients resync."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.e2e.server import Server, run_command, wait_until

from slicewise.client import Client, ResyncError
from slicewise.control.state import State
from slicewise.kubernetes.journal import ControllerJournal

NODE = {"name": "n1", "model": "A100-80GB", "gpus": 1}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.start()
    yield made
    made.kill()


def backed_up(server: Server, file: Path) -> None:
    """Take a backup, then write more."""
    server.backup(file)
    for name in ("lost-1", "lost-2", "lost-3"):
        assert server.ask("POST", "/v1/tenants", {"name": name})[0] == 201


def restored(server: Server, file: Path) -> None:
    """Restore the service from the backup."""
    server.stop()
    token = (server.data / "admin-token").read_text()
    server.data = server.folder / "restored"
    run_command("restore", "--data", server.data, file)
    (server.data / "admin-token").write_text(token)
    server.start()


def test_a_position_of_another_history_is_refused_with_advice(
    server: Server, tmp_path: Path
) -> None:
    ready = server.readiness()
    assert ready is not None
    backed_up(server, tmp_path / "backup")
    _, cluster = server.ask("GET", "/v1/cluster")
    old = f"{cluster['history']}-{cluster['seq']}"
    restored(server, tmp_path / "backup")
    for asked in (
        {"path": "/v1/events", "headers": {"last-event-id": old}},
        {"path": f"/v1/events?after={old}"},
        {"path": f"/v1/events?after={cluster['history']}-1"},  # even if the entry number exists
        {"path": f"/v1/events?after={cluster['seq']}"},
    ):
        status, content = server.ask("GET", **asked)
        assert status == 410, content
        assert "read the state again" in content["detail"]
    _, now = server.ask("GET", "/v1/cluster")
    assert now["history"] != cluster["history"]
    with (
        Client(server.url, server.admin_token) as client,
        closing(client.events(f"{now['history']}-{now['seq']}")) as events,
    ):
        client.add_tenant("new")
        assert next(events).subject == "new"


def test_a_following_client_gets_a_resync_error(server: Server, tmp_path: Path) -> None:
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


def test_the_command_continues_from_now(server: Server, tmp_path: Path) -> None:
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
        wait_until(lambda: "lost-3" in told.read_text())
        server.stop()
        restore_at(server, tmp_path / "backup", port)
        assert following.stderr is not None
        assert b"another history" in following.stderr.readline()
        numbers = itertools.count()

        def seen() -> bool:  # the command follows from its second request on
            server.ask("POST", "/v1/tenants", {"name": f"new-{next(numbers)}"})
            return "new-" in told.read_text()

        wait_until(seen)
    finally:
        following.kill()
        following.communicate()


def restore_at(server: Server, file: Path, port: int) -> None:
    """Restore, and serve from the same address."""
    token = (server.data / "admin-token").read_text()
    server.data = server.folder / "restored"
    run_command("restore", "--data", server.data, file)
    (server.data / "admin-token").write_text(token)
    server.port = port
    server.start()


def test_every_controller_has_its_own_history() -> None:
    """In Kubernetes the journal is in memory."""
    spans = [ControllerJournal(State(), lambda: "").span() for _ in range(2)]
    assert spans[0].history != spans[1].history
