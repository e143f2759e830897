"""A request that pauses halfway: head and part of the body are sent, the rest later."""

from __future__ import annotations

import json
import socket
import ssl
from typing import Any

from tests.e2e.server import PATIENCE_SECONDS, Server

Answer = tuple[int, dict[str, str], Any]


class Halfway:
    """One request on its own connection."""

    def __init__(
        self,
        server: Server,
        method: str,
        path: str,
        token: str | None,
        body: object = None,
        headers: dict[str, str] | None = None,
        patience: float = PATIENCE_SECONDS,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """``context`` is for a service with TLS; with it, a certificate may replace the token."""
        content = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            "host: service",
            "connection: close",
            *([] if token is None else [f"authorization: Bearer {token}"]),
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(content)}"]
        half = len(content) // 2
        self._rest = content[half:]
        self._socket = socket.create_connection(server.address, timeout=patience)
        if context is not None:
            self._socket = context.wrap_socket(self._socket, server_hostname=server.address[0])
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + content[:half])

    def finish(self) -> Answer:
        """Send the rest and return the status, the headers and the decoded body."""
        self._socket.sendall(self._rest)
        status, headers, content = self.read()
        return status, headers, json.loads(content) if content else None

    def read(self) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body, once the service has ended its answer."""
        with self._socket:
            data = b""
            while piece := self._socket.recv(65536):
                data += piece
        head, _, content = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, content
