"""An unauthenticated client that opens too many connections loses its own, not those of others."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from pathlib import Path

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server

FILES = 300
"""The server's limit of open files."""
STRANGER, TENANT = "127.0.0.3", "127.0.0.2"
"""Client addresses on the loopback interface."""


@pytest.mark.parametrize("beginning", [b"", b"POST /v1/allocations HTTP/1.1\r\nhost: x\r\n"])
def test_one_address_cannot_exhaust_the_connections(tmp_path: Path, beginning: bytes) -> None:
    server = Server(tmp_path)
    server.prefix = ["prlimit", f"--nofile={FILES}:{FILES}"]
    server.start()
    try:
        node = {"name": "n", "model": "A100-80GB", "gpus": 2}
        assert server.ask("POST", "/v1/nodes", node)[0] == 201
        honest = http.client.HTTPConnection(
            *server.address, timeout=PATIENCE_SECONDS, source_address=(TENANT, 0)
        )
        headers = {"authorization": f"Bearer {server.admin_token}"}
        with contextlib.ExitStack() as stack:
            stack.callback(honest.close)
            honest.request("GET", "/v1/whoami", headers=headers)
            assert honest.getresponse().read()
            for _ in range(2 * FILES):
                held = stack.enter_context(
                    socket.create_connection(server.address, PATIENCE_SECONDS, (STRANGER, 0))
                )
                with contextlib.suppress(OSError):  # it may be closed already
                    held.sendall(beginning)
            # The connection that was already open, and a new one.
            again = stack.enter_context(contextlib.closing(_connection(server)))
            for connection in (honest, again):
                body = json.dumps({"profile": "1g.10gb"})
                sent = headers | {"content-type": "application/json"}
                connection.request("POST", "/v1/allocations", body, sent)
                answer = connection.getresponse()
                assert (answer.status, bool(answer.read())) == (201, True)
            assert server.readiness() is not None
    finally:
        server.kill()


def _connection(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(
        *server.address, timeout=PATIENCE_SECONDS, source_address=(TENANT, 0)
    )
