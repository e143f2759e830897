"""Every journal entry records the actor and the address; tenants do not see addresses."""

from __future__ import annotations

import socket
from typing import Any

from tests.e2e.conftest import Open
from tests.e2e.server import PATIENCE_SECONDS, Server


def events(server: Server, token: str, expected: int) -> str:
    """Return this many events from the beginning of a stream."""
    head = (
        f"GET /v1/events?after=0 HTTP/1.1\r\nhost: service\r\nauthorization: Bearer {token}\r\n\r\n"
    )
    text = ""
    with socket.create_connection(server.address, timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(head.encode())
        while text.count("\ndata: ") < expected:
            text += connection.recv(65536).decode()
    return text


def entries(server: Server, **query: str) -> list[dict[str, Any]]:
    """Return the audit log."""
    path = "&".join(f"{name}={value}" for name, value in query.items())
    status, page = server.ask("GET", f"/v1/audit?{path}")
    assert status == 200, page
    return list(page["events"])


def test_entries_record_actor_and_address(open_server: Open) -> None:
    server = open_server("audit", settings=("proxies.trusted=127.0.0.1",))
    server.start()
    came = {"x-forwarded-for": "8.8.8.8, 192.0.2.9"}
    server.ask("POST", "/v1/nodes", {"name": "n1", "model": "A100-80GB", "gpus": 1}, headers=came)
    server.ask("POST", "/v1/tenants", {"name": "acme"})
    order = {"role": "tenant", "tenant": "acme", "note": "the build farm"}
    _, made = server.ask("POST", "/v1/tokens", order)
    status, _ = server.ask(
        "POST", "/v1/allocations", {"profile": "1g.10gb"}, token=made["token"], headers=came
    )
    assert status == 201
    (placed,) = entries(server, kind="allocated")
    assert (placed["actor"], placed["role"]) == (made["id"], "tenant")
    assert (placed["note"], placed["origin"]) == ("the build farm", "192.0.2.9")
    told = events(server, made["token"], 3)
    assert placed["entry"]["allocation"]["id"] in told
    assert "192.0.2.9" not in told
    assert "127.0.0.1" not in told
    server.ask("DELETE", f"/v1/tokens/{made['id']}")
    (placed,) = entries(server, kind="allocated")  # the note outlives the token
    assert (placed["note"], placed["origin"]) == ("the build farm", "192.0.2.9")
    (revoked,) = entries(server, kind="token-revoked")
    assert (revoked["role"], revoked["origin"]) == ("admin", "127.0.0.1")
    begun = entries(server, kind="tenant-set", tenant="default")
    assert [(one["actor"], one["origin"]) for one in begun] == [("service", "")]
