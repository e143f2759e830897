"""The connection to the API: whatever goes wrong there is an error that its callers expect."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from kubernetes import client, config

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import Node
from slicewise.k8s.link import ConflictError, ExpiredError, Link, MissingError, UnreachableError


@contextmanager
def answering(status: int, body: bytes, length: int | None = None) -> Iterator[Link]:
    """An API that always answers this; with ``length`` it promises more than it sends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Link(client.Configuration(host=f"http://127.0.0.1:{server.server_port}"))
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (404, MissingError),
        (409, ConflictError),
        (410, ExpiredError),
        (429, UnreachableError),
        (500, UnreachableError),
        (503, UnreachableError),
    ],
)
def test_refusals_are_told_apart(status: int, error: type[SlicewiseError]) -> None:
    with answering(status, b'{"reason": "Because", "message": "no"}') as link:
        with pytest.raises(error, match="no"):
            link.get("/x", Node)
        with pytest.raises(error, match="no"), link.watch("/x", "1", 1):
            raise AssertionError("there is nothing to watch")


def test_a_refusal_that_is_cut_off_is_no_answer() -> None:
    with answering(500, b"half", length=100) as link:
        with pytest.raises(UnreachableError):
            link.get("/x", Node)
        with pytest.raises(UnreachableError), link.watch("/x", "1", 1):
            raise AssertionError("there is nothing to watch")


@pytest.mark.parametrize("line", [b"<html>", b"{}", b'{"type": "ERROR", "object": 3}'])
def test_a_watch_that_says_nonsense_is_an_error_that_is_expected(line: bytes) -> None:
    good = b'{"type": "ADDED", "object": {"metadata": {"name": "n1"}}}\n'
    with answering(200, good + line + b"\n") as link, link.watch("/x", "1", 1) as happenings:
        assert next(happenings).type == "ADDED"
        with pytest.raises(SlicewiseError, match="not clear"):
            next(happenings)


def test_credentials_that_cannot_be_read_are_as_if_nobody_answered() -> None:
    configuration = client.Configuration(api_key={"authorization": "Bearer old"})

    def fail(_: object) -> None:
        raise config.ConfigException("Token file exists but empty.")

    configuration.refresh_api_key_hook = fail  # type: ignore[assignment]
    with pytest.raises(UnreachableError, match="exists but empty"):
        Link(configuration).get("/x", Node)


def test_a_connection_whose_other_end_has_vanished_is_noticed() -> None:
    options = Link(client.Configuration())._pool.connection_pool_kw["socket_options"]
    assert (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1) in options
