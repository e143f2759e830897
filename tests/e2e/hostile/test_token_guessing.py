"""Guessed tokens are counted, logged with their address, and rate limited by address."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = (
        "limits.strangers_per_second=5",
        "limits.agent_requests_per_second=5",
        "proxies.trusted=127.0.0.1",
    )
    made = Server(tmp_path_factory.mktemp("strangers"), settings=settings)
    try:
        made.start()
        yield made
    finally:
        made.kill()


def guess(server: Server, times: int, header: str, origin: str) -> list[int]:
    """Send requests one by one on one connection; return the statuses."""
    line = f"authorization: {header}\r\n" if header else ""
    request = (
        f"GET /v1/whoami HTTP/1.1\r\nhost: service\r\nx-forwarded-for: {origin}\r\n{line}\r\n"
    ).encode()
    found = []
    with socket.create_connection(server.address, timeout=PATIENCE_SECONDS) as connection:
        stream = connection.makefile("rb")
        for _ in range(times):
            connection.sendall(request)
            found.append(int(stream.readline().split()[1]))
            length = 0
            while (head := stream.readline().strip()) != b"":
                name, _, value = head.partition(b":")
                if name == b"content-length":
                    length = int(value)
            stream.read(length)
    return found


def read_metrics(server: Server, token: str | None = "", **headers: str) -> tuple[int, str]:
    """Return the metrics as text, as the admin by default."""
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE_SECONDS)
    secret = server.admin_token if token == "" else token
    sent = dict(headers)
    if secret is not None:
        sent["authorization"] = f"Bearer {secret}"
    try:
        connection.request("GET", "/metrics", headers=sent)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_guesses_are_counted_by_reason_and_logged_with_their_address(server: Server) -> None:
    name = 'slicewise_authentication_failures_total{{reason="{}"}}'.format
    before = {why: server.metric(name(why)) for why in ("missing", "malformed", "unknown")}
    assert guess(server, 1, "", "192.0.2.1") == [401]
    assert guess(server, 1, "Basic eDp5", "192.0.2.1") == [401]
    assert guess(server, 2, "Bearer wrong", "192.0.2.1") == [401, 401]
    grown = {why: server.metric(name(why)) - count for why, count in before.items()}
    assert grown == {"missing": 1, "malformed": 1, "unknown": 2}
    wait_until(lambda: "authentication failed" in server.log.read_text())
    lines = [line for line in server.log.read_text().splitlines() if "192.0.2.1" in line]
    assert len(lines) <= 2  # a summary, or two if one was due in between
    assert sum(int(count) for line in lines for count in re.findall(r"count=(\d+)", line)) == 4


def test_guesses_are_rate_limited_but_not_a_valid_token(server: Server) -> None:
    threads = [
        threading.Thread(target=guess, args=(server, 4, "Bearer wrong", "192.0.2.2"))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    found = guess(server, 3, "Bearer wrong", "192.0.2.2")
    valid = guess(server, 200, f"Bearer {server.admin_token}", "192.0.2.2")
    elsewhere = guess(server, 1, "Bearer wrong", "192.0.2.3")
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert 429 in found
    assert valid == [200] * 200
    assert elsewhere == [401]
    assert server.metric('slicewise_rate_limited_total{limit="stranger"}') > 0


def test_only_an_agent_that_polls_too_often_is_limited(server: Server) -> None:
    _, one = server.ask("POST", "/v1/tokens", {"role": "agent", "node": "n1"})
    _, other = server.ask("POST", "/v1/tokens", {"role": "agent", "node": "n2"})
    found = guess(server, 50, f"Bearer {one['token']}", "192.0.2.4")
    assert set(found) == {200, 429}
    assert guess(server, 1, f"Bearer {other['token']}", "192.0.2.4") == [200]


def test_pages_are_limited_by_address_and_health_is_not(server: Server) -> None:
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE_SECONDS)
    found = {}
    for path in ("/no/such/page", "/healthz", "/readyz"):
        statuses = set()
        for _ in range(50):
            connection.request("GET", path, headers={"x-forwarded-for": "192.0.2.5"})
            answer = connection.getresponse()
            answer.read()
            statuses.add(answer.status)
        found[path] = statuses
    connection.close()
    assert found == {"/no/such/page": {404, 429}, "/healthz": {200}, "/readyz": {200}}


def test_metrics_need_a_token_even_on_loopback(server: Server) -> None:
    """A proxy on the same machine connects from loopback for any client."""
    assert read_metrics(server, None)[0] == 401
    assert read_metrics(server, None, **{"x-forwarded-for": "192.0.2.6"})[0] == 401
    assert read_metrics(server)[0] == 200
