"""Token rotation: clients keep working, and the old token ends on time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server, wait_until

from slicewise.client import ApiError, Client


def rotated(server: Server, identity: str, **how: Any) -> tuple[int, Any]:
    return server.ask("POST", f"/v1/tokens/{identity}/rotate", how or None)


def test_both_tokens_are_valid_during_the_overlap(server: Server) -> None:
    old = server.issue_token(role="tenant", tenant="acme", note="the build farm")
    status, new = rotated(server, old["id"], overlap_seconds=2)
    assert status == 201, new
    assert new["id"] != old["id"]
    assert new["token"] != old["token"]
    for name in ("role", "tenant", "node", "note", "expires_at"):
        assert new[name] == old[name]
    assert server.accepts(new["token"])
    wait_until(lambda: not server.accepts(old["token"]))
    assert server.accepts(new["token"])
    status, content = rotated(server, old["id"])
    assert (status, content["reason"]) == (409, "expired")
    page = server.ask("GET", f"/v1/audit?subject={old['id']}")[1]["events"]
    assert [one["kind"] for one in page] == ["token-expiring", "token-issued"]
    (made,) = server.ask("GET", f"/v1/audit?subject={new['id']}")[1]["events"]
    assert made["entry"]["replaces"] == old["id"]


def test_without_an_overlap_the_old_token_ends_at_once(server: Server) -> None:
    old = server.issue_token(role="operator")
    status, new = rotated(server, old["id"], overlap_seconds=0, expires_in_seconds=3600)
    assert status == 201, new
    assert new["expires_at"] is not None
    assert not server.accepts(old["token"])
    assert server.accepts(new["token"])


def test_a_rotation_does_not_extend_the_expiry(server: Server) -> None:
    old = server.issue_token(role="operator", expires_in_seconds=100)
    _, new = rotated(server, old["id"], overlap_seconds=5000)
    assert new["expires_at"] == old["expires_at"]
    listed = {one["id"]: one for one in server.ask("GET", "/v1/tokens")[1]["tokens"]}
    assert listed[old["id"]]["expires_at"] == old["expires_at"]


def test_only_admins_rotate_and_only_existing_tokens(server: Server) -> None:
    operator = server.issue_token(role="operator")
    path = f"/v1/tokens/{operator['id']}/rotate"
    assert server.ask("POST", path, token=operator["token"])[0] == 403
    assert rotated(server, "t-unknown")[0] == 404
    assert rotated(server, operator["id"], overlap_seconds=-1)[0] == 400


def test_the_command_and_the_clients_switch_to_the_new_token(
    server: Server, tmp_path: Path
) -> None:
    old = server.issue_token(role="operator")
    file, fresh, admin = tmp_path / "token", tmp_path / "fresh", tmp_path / "admin"
    file.write_text(old["token"])
    admin.write_text(server.admin_token)
    with Client(server.url, file.read_text) as client:
        assert client.whoami().id == old["id"]
        command = [sys.executable, "-m", "slicewise.cli", "tokens", "rotate", old["id"]]
        command += ["--overlap", "0", "--out", str(fresh), "--server", server.url]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLICEWISE_")}
        done = subprocess.run(
            [*command, "--token-file", str(admin)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        with pytest.raises(ApiError) as refused:
            client.whoami()
        assert refused.value.status == 401
        file.write_text(fresh.read_text().strip())
        assert client.whoami().id in done.stdout
