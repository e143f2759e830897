"""The API client: every failure raises an error that its callers expect."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kubernetes import client, config
from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import Node
from slicewise.kubernetes.api_client import (
    ApiClient,
    ApiUnreachableError,
    ConflictError,
    ExpiredError,
    NotFoundError,
)


@contextmanager
def answering(status: int, body: bytes, length: int | None = None) -> Iterator[ApiClient]:
    """An API that always answers this; with ``length`` it promises more than it sends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Discard the log."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.server_port}"))
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, NotFoundError),
        (409, ConflictError),
        (410, ExpiredError),
        (429, ApiUnreachableError),
        (500, ApiUnreachableError),
        (503, ApiUnreachableError),
    ],
)
def test_each_refusal_raises_its_own_error(status: int, error: type[SlicewiseError]) -> None:
    with answering(status, b'{"reason": "Because", "message": "no"}') as link:
        with pytest.raises(error, match="no"):
            link.get("/x", Node)
        with pytest.raises(error, match="no"), link.watch("/x", "1", 1):
            raise AssertionError("there is nothing to watch")


def test_an_interrupted_refusal_counts_as_no_answer() -> None:
    with answering(500, b"half", length=100) as link:
        with pytest.raises(ApiUnreachableError):
            link.get("/x", Node)
        with pytest.raises(ApiUnreachableError), link.watch("/x", "1", 1):
            raise AssertionError("there is nothing to watch")


@pytest.mark.parametrize("line", [b"<html>", b"{}", b'{"type": "ERROR", "object": 3}'])
def test_an_invalid_event_of_a_watch_raises_an_expected_error(line: bytes) -> None:
    good = b'{"type": "ADDED", "object": {"metadata": {"name": "n1"}}}\n'
    with answering(200, good + line + b"\n") as link, link.watch("/x", "1", 1) as events:
        assert next(events).type == "ADDED"
        with pytest.raises(SlicewiseError, match="invalid event"):
            next(events)


def test_unreadable_credentials_count_as_no_answer() -> None:
    configuration = client.Configuration(api_key={"authorization": "Bearer old"})

    def fail(_: object) -> None:
        raise config.ConfigException("Token file exists but empty.")

    configuration.refresh_api_key_hook = fail  # type: ignore[assignment]
    with pytest.raises(ApiUnreachableError, match="exists but empty"):
        ApiClient(configuration).get("/x", Node)


def test_a_dead_peer_is_detected() -> None:
    options = ApiClient(client.Configuration())._pool.connection_pool_kw["socket_options"]
    assert (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1) in options
