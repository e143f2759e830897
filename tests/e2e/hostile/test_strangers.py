"""Those who guess tokens are counted, logged with their address, and slowed down alone."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.e2e.server import PATIENCE_SECONDS, Server


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
    """Send requests one after the other on one connection: the statuses that came back."""
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


def metric(server: Server, name: str) -> float:
    """A value of the metrics; 0 if there is none."""
    _, text = ask_text(server)
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def ask_text(server: Server, token: str | None = "", **headers: str) -> tuple[int, str]:
    """Ask for the metrics, as the admin unless told otherwise."""
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


def until(what: Callable[[], object]) -> None:
    """Wait until something holds."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < give_up, "it never came to hold"
        time.sleep(0.1)


def test_guesses_are_counted_by_reason_and_logged_with_their_address(server: Server) -> None:
    name = 'slicewise_authentication_failures_total{{reason="{}"}}'.format
    before = {why: metric(server, name(why)) for why in ("missing", "malformed", "unknown")}
    assert guess(server, 1, "", "192.0.2.1") == [401]
    assert guess(server, 1, "Basic eDp5", "192.0.2.1") == [401]
    assert guess(server, 2, "Bearer wrong", "192.0.2.1") == [401, 401]
    grown = {why: metric(server, name(why)) - count for why, count in before.items()}
    assert grown == {"missing": 1, "malformed": 1, "unknown": 2}
    until(lambda: "authentication failed" in server.log.read_text())
    lines = [line for line in server.log.read_text().splitlines() if "192.0.2.1" in line]
    assert len(lines) <= 2  # a summary, or two if one was due in between
    assert sum(int(count) for line in lines for count in re.findall(r"count=(\d+)", line)) == 4


def test_many_guesses_are_slowed_down_and_a_valid_token_behind_them_is_not(server: Server) -> None:
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
    assert metric(server, 'slicewise_rate_limited_total{limit="stranger"}') > 0


def test_an_agent_that_asks_too_often_is_held_up_alone(server: Server) -> None:
    _, one = server.ask("POST", "/v1/tokens", {"role": "agent", "node": "n1"})
    _, other = server.ask("POST", "/v1/tokens", {"role": "agent", "node": "n2"})
    found = guess(server, 50, f"Bearer {one['token']}", "192.0.2.4")
    assert set(found) == {200, 429}
    assert guess(server, 1, f"Bearer {other['token']}", "192.0.2.4") == [200]


def test_pages_have_a_limit_by_address_and_health_has_none(server: Server) -> None:
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


def test_metrics_need_a_token_also_on_loopback(server: Server) -> None:
    """A proxy on the same machine asks from loopback for anyone, and need not say so."""
    assert ask_text(server, None)[0] == 401
    assert ask_text(server, None, **{"x-forwarded-for": "192.0.2.6"})[0] == 401
    assert ask_text(server)[0] == 200
