"""One tenant's load costs other tenants almost nothing: fair turns, and limits per tenant."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server

ALLOCATIONS = 6000
FLOOD = 150
"""Connections of the flooding tenant."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service with 65,536 GPUs, and thousands of allocations of one tenant."""
    made = Server(
        tmp_path_factory.mktemp("neighbours"), settings=("limits.requests_per_second=1000000",)
    )
    made.start()
    try:
        populate(made)
        yield made
    finally:
        made.kill()


def populate(server: Server) -> None:
    """Register nodes and two tenants, and place the allocations of one of them."""
    for name in ("busy", "quiet"):
        assert server.ask("POST", "/v1/tenants", {"name": name})[0] == 201
    for number in range(64):
        node = {"name": f"n{number}", "model": "A100-80GB", "gpus": 1024}
        assert server.ask("POST", "/v1/nodes", node)[0] == 201
    some = [{"profile": "1g.10gb", "tenant": "busy", "labels": {"x": "z"}} for _ in range(100)]
    for _ in range(ALLOCATIONS // 100):
        status, content = server.ask("POST", "/v1/allocations/batch", {"allocations": some})
        assert status == 201, content


def token_of(server: Server, tenant: str) -> str:
    """Issue a token of a tenant."""
    token: str = server.issue_token(role="tenant", tenant=tenant)["token"]
    return token


def message(method: str, path: str, token: str, body: bytes = b"", length: int = -1) -> bytes:
    """Encode an HTTP request."""
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
    if body:
        length = len(body) if length < 0 else length
        head += f"content-type: application/json\r\ncontent-length: {length}\r\n"
    return head.encode() + b"\r\n" + body


def status_of(connection: socket.socket) -> int:
    """Read the status of the next response."""
    data = b""
    while b"\r\n" not in data:
        piece = connection.recv(4096)
        assert piece, "the server closed the connection"
        data += piece
    return int(data[9:12])


@contextlib.contextmanager
def connections(server: Server, count: int) -> Iterator[list[socket.socket]]:
    """Open connections to a server."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(server.address, PATIENCE_SECONDS))
            for _ in range(count)
        ]


def settle(server: Server, path: str, token: str) -> None:
    """Wait until the requests of the previous test have ended."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while (status := server.ask("GET", path, token=token)[0]) == 429:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    assert status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/allocations?node=none",
        "/v1/allocations?limit=1000",
        "/v1/cluster?gpus=true",
        "/v1/compare?gpus=64&steps=500&seed={number}",
    ],
)
def test_writes_and_health_overtake_another_tenants_reads(server: Server, path: str) -> None:
    """The reads arrive first, and most of them are still unanswered when the others are answered.

    The order does not depend on the speed of the machine.
    """
    busy, quiet = token_of(server, "busy"), token_of(server, "quiet")
    settle(server, path.format(number=0), busy)
    body = b'{"profile":"1g.10gb"}'
    with connections(server, FLOOD) as flood, connections(server, 2) as (writer, health):
        for number, connection in enumerate(flood):
            connection.sendall(message("GET", path.format(number=number), busy))
        writer.sendall(message("POST", "/v1/allocations", quiet, body))
        health.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        waiting = {writer, health}
        answered = 0
        with selectors.DefaultSelector() as selector:
            for connection in (*flood, writer, health):
                selector.register(connection, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select(PATIENCE_SECONDS)]
                assert ready, "no answer came"
                waiting.difference_update(ready)
                if not waiting:
                    break
                for one in ready:
                    selector.unregister(one)
                    assert isinstance(one, socket.socket)
                    if one not in (writer, health):
                        answered += one.recv(12, socket.MSG_PEEK).endswith(b"200")  # not refused
        assert status_of(writer) == 201
        assert status_of(health) == 200
    assert answered < FLOOD / 2, f"{answered} of {FLOOD} reads were answered first"


def test_unread_responses_use_no_memory(server: Server) -> None:
    """Each response has 6 MB, more than the kernel buffers for a connection."""
    busy, quiet = token_of(server, "busy"), token_of(server, "quiet")
    settle(server, "/v1/cluster?gpus=true", busy)
    before = server.resident_bytes
    with connections(server, 150) as unread:
        for connection in unread:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(message("GET", "/v1/cluster?gpus=true", busy))
        for connection in unread:
            connection.recv(1, socket.MSG_PEEK)  # all responses have started
        assert server.ask("GET", "/v1/cluster?gpus=true", token=quiet)[0] == 200
        assert server.resident_bytes - before < 120 << 20


def test_requests_in_flight_are_limited_per_tenant(tmp_path: Path) -> None:
    server = Server(tmp_path, settings=("limits.requests_in_flight=5",))
    server.start()
    try:
        for name in ("busy", "quiet"):
            assert server.ask("POST", "/v1/tenants", {"name": name})[0] == 201
        node = {"name": "n", "model": "A100-80GB", "gpus": 8}
        assert server.ask("POST", "/v1/nodes", node)[0] == 201
        busy, quiet = token_of(server, "busy"), token_of(server, "quiet")
        body = b'{"profile":"1g.10gb"}'
        begun = message("POST", "/v1/allocations", busy, body[:5], len(body))
        with connections(server, 5) as slow, connections(server, 2) as (more, other):
            for connection in slow:
                connection.sendall(begun)
            # The sixth request is refused once the other five have arrived.
            for _ in range(1000):
                more.sendall(message("GET", "/v1/whoami", busy))
                status = status_of(more)
                if status == 429:
                    break
                assert status == 200
                drain(more)
            assert status == 429
            other.sendall(message("POST", "/v1/allocations", quiet, body))
            assert status_of(other) == 201
            for connection in slow:
                connection.sendall(body[5:])
                assert status_of(connection) == 201
        assert server.ask("GET", "/v1/whoami", token=busy)[0] == 200, "all of them have ended"
    finally:
        server.kill()


def drain(connection: socket.socket) -> None:
    """Read the available bytes of a response."""
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.recv(4096):
            pass
    connection.settimeout(PATIENCE_SECONDS)


def test_a_tenants_streams_are_not_triggered_by_other_tenants(server: Server) -> None:
    """Revoking a token still ends its streams, even if no event concerns them."""
    token = server.issue_token(role="tenant", tenant="busy")
    quiet = token_of(server, "quiet")
    with connections(server, 1) as (stream,):
        stream.sendall(message("GET", "/v1/events", token["token"]))
        data = b""
        while b"retry: 2000" not in data:
            data += stream.recv(4096)
        body = {"profile": "1g.10gb"}
        assert server.ask("POST", "/v1/allocations", body, token=quiet)[0] == 201
        assert server.ask("DELETE", f"/v1/tokens/{token['id']}")[0] == 200
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            piece = stream.recv(4096)
            assert piece, "the stream ends in order"
            rest += piece
        assert b"allocated" not in rest
