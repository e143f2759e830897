"""Behind real proxies, which share connections, each client gets its own responses."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.e2e.hostile.fuzz_http import Fuzzer
from tests.e2e.hostile.proxies import Proxy, documented, edited
from tests.e2e.hostile.raw import AnswerError
from tests.e2e.hostile.sender import CHUNKED, OFFERS, WISH, Sender, Victim
from tests.e2e.server import PATIENCE_SECONDS, Server

TRIES = int(os.environ.get("SLICEWISE_PROXY_TRIES", "200"))
VICTIMS = 3

MAP = "map $http_upgrade $connection_upgrade { default upgrade; '' ''; }\n"
WEBSOCKETS = (
    ("upstream slicewise {", MAP + "upstream slicewise {"),
    (
        'proxy_set_header Connection "";',
        "proxy_set_header Upgrade $http_upgrade;\n"
        "    proxy_set_header Connection $connection_upgrade;",
    ),
    # With few connections, a victim soon gets that of the attacker.
    ("keepalive 32", "keepalive 1"),
)
UNBUFFERED = (
    "proxy_read_timeout 90s;",
    "proxy_read_timeout 90s;\n    proxy_request_buffering off;\n    proxy_buffering off;",
)
SHARED = ("option httpchk GET /readyz", "http-reuse always\n    option httpchk GET /readyz")


class Case(NamedTuple):
    """A proxy, and the differences of its configuration from the documented one."""

    kind: str
    changes: tuple[tuple[str, str], ...] = ()


CASES = {
    "nginx": Case("nginx"),
    "nginx, websockets": Case("nginx", WEBSOCKETS),
    "nginx, websockets, unbuffered": Case("nginx", (*WEBSOCKETS, UNBUFFERED)),
    "haproxy": Case("haproxy"),
    "haproxy, shared": Case("haproxy", (SHARED,)),
    "haproxy, shared, buffered": Case(
        "haproxy", (SHARED, ("mode http", "mode http\n    option http-buffer-request"))
    ),
}


@pytest.fixture(params=list(CASES.values()), ids=list(CASES), scope="module")
def proxy(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    case: Case = request.param
    text = edited(documented(case.kind), *case.changes)
    made = Proxy(case.kind, text, Path(tmp_path_factory.mktemp("proxy")), server.address)
    try:
        made.wait_until_ready()
        yield made
    finally:
        made.stop()


@pytest.fixture
def sender(server: Server) -> Sender:
    return Sender(server)


def attacks(sender: Sender) -> list[Callable[[str], tuple[bytes, bytes]]]:
    """Return functions that build the head of a request with an id, and the part sent later.

    The hidden request takes a while, because it is written to disk. By then a victim may have the
    connection.
    """
    slow = sender.post("hidden", WISH, path="/v1/allocations")

    def sized(offer: bytes, body: bytes) -> Callable[[str], tuple[bytes, bytes]]:
        def make(id: str) -> tuple[bytes, bytes]:
            whole = sender.post(id, body, offer)
            return whole[: -len(body)], body

        return make

    def chunked(id: str) -> tuple[bytes, bytes]:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(slow), slow)
        whole = sender.post(id, body, OFFERS["h2c"] + CHUNKED, length=None)
        return whole[: -len(body)], body

    def get(id: str) -> tuple[bytes, bytes]:
        length = b"Content-Length: %d\r\n" % len(slow)
        return sender.get(id, "/v1/nodes", more=OFFERS["websocket"] + length), slow

    def behind(id: str) -> tuple[bytes, bytes]:
        return sender.get(id, more=OFFERS["websocket"]), slow

    return [
        *[sized(offer, slow) for offer in OFFERS.values()],
        # Long enough that a buffering proxy sends it after the head. Some parsers skip such lines.
        *[sized(OFFERS["websocket"], b"\r\n" * n + slow) for n in (2_000, 10_000, 30_000)],
        sized(OFFERS["websocket"] + b"Expect: 100-continue\r\n", slow),
        chunked,
        get,
        behind,
    ]


def test_every_client_gets_its_own_responses(proxy: Proxy, sender: Sender) -> None:
    chance = random.Random(1)
    kinds = attacks(sender)
    paths = ("/v1/whoami", "/v1/nodes", "/healthz", "/v1/allocations/dry-run")
    with ExitStack() as stack:
        victims = [stack.enter_context(Victim(sender, proxy.connect)) for _ in range(VICTIMS)]
        for number in range(TRIES):
            with proxy.connect() as attacker:
                head, later = kinds[number % len(kinds)](f"attacker-{number}")
                attacker.send(head, later, pause=chance.choice((0, 0.0003, 0.0006, 0.002)))
                for place, victim in enumerate(victims):
                    victim.ask(f"victim-{number}-{place}", chance.choice(paths))


def test_fuzzed_requests_do_not_affect_other_clients(
    proxy: Proxy, sender: Sender, seed: int
) -> None:
    """Proxies parse some messages differently; only the sender may be affected."""
    fuzzer = Fuzzer(sender, seed)
    answered = 0
    with Victim(sender, proxy.connect) as victim:
        for number in range(TRIES):
            conversation = fuzzer.conversation(number)
            with proxy.connect() as attacker:
                attacker.wait_no_longer_than(0.05)
                attacker.send(*conversation.pieces, pause=conversation.pause)
                victim.ask(f"victim-{number}")
                # Do not wait for a proxy that expects more bytes.
                with suppress(TimeoutError, AnswerError):
                    while (answer := attacker.answer()) is not None:
                        answered += 1
                        # The mutation may have changed the id, and some responses have another one.
                        its = rf"(?<![\w.-]){re.escape(answer.id)}(?![\w.-])".encode()
                        own = "." not in answer.id or re.search(its, conversation.data)
                        assert own, (seed, conversation, answer)
            victim.ask(f"again-{number}")
    assert answered


def test_an_h2c_offer_is_ignored(proxy: Proxy, sender: Sender) -> None:
    for number in range(5):
        with proxy.connect() as raw:
            id = f"h2c-{number}"
            raw.send(sender.post(id, WISH, OFFERS["h2c"], path="/v1/allocations"))
            answer = raw.answer()
            assert answer is not None
            assert (answer.status, answer.id) == (201, id)


def test_events_are_not_buffered(proxy: Proxy, sender: Sender) -> None:
    with proxy.connect() as stream, proxy.connect() as raw:
        stream.send(sender.get("stream", "/v1/events"))
        stream.read_until(b"retry")
        for number in range(3):
            name = f"t{random.getrandbits(40):x}"
            body = b'{"name":"%b"}' % name.encode()
            raw.send(sender.post(f"tenant-{number}", body, path="/v1/tenants"))
            answer = raw.answer()
            assert answer is not None
            assert answer.status == 201
            stream.read_until(name.encode())


@pytest.mark.parametrize("kind", ["nginx", "haproxy"])
def test_a_forged_client_address_is_overwritten(kind: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as service:
        proxy = Proxy(kind, documented(kind), tmp_path, service.getsockname())
        try:
            head = forwarded_head(service, proxy)
        finally:
            proxy.stop()
    lines = head.decode().lower().split("\r\n")
    assert [line for line in lines if line.startswith("x-forwarded-for")] == [
        "x-forwarded-for: 127.0.0.1"
    ]
    assert "x-forwarded-proto: https" in lines
    assert "6.6.6.6" not in head.decode()


def forwarded_head(service: socket.socket, proxy: Proxy) -> bytes:
    """Return the head of a client's request as the proxy forwards it to a stub service."""
    service.settimeout(PATIENCE_SECONDS)
    heads: list[bytes] = []

    def serve() -> None:
        while not heads or b"GET /readyz" in heads[-1]:
            connection, _ = service.accept()
            with connection:
                connection.settimeout(PATIENCE_SECONDS)
                head = b""
                while not head.endswith(b"\r\n\r\n") and (more := connection.recv(1 << 16)):
                    head += more
                heads.append(head)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        proxy.wait_until_ready()
        with proxy.connect() as raw:
            forged = b"X-Forwarded-For: 6.6.6.6\r\n" * 2 + b"X-Forwarded-Proto: gopher\r\n"
            raw.send(b"GET /asked HTTP/1.1\r\nHost: x\r\n" + forged + b"\r\n")
            answer = raw.answer()
            assert answer is not None
            assert answer.status == 200
    finally:
        thread.join()
    return heads[-1]


def test_large_bodies_and_errors_are_forwarded(proxy: Proxy, sender: Sender) -> None:
    for number, (size, status) in enumerate(((30_000, 200), (60_000, 200), (70_000, 413)) * 3):
        # A proxy may close the connection after a response that precedes the end of the body.
        with proxy.connect() as raw:
            raw.send(sender.post(f"large-{number}", WISH + b" " * size))
            answer = raw.answer()
            assert answer is not None
            assert (answer.status, answer.id) == (status, f"large-{number}")
