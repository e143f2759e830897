"""The server on a socket: protocol limits and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.e2e.server import PATIENCE_SECONDS
from tests.server.harness import Clock

from slicewise.config.settings import Settings
from slicewise.config.values import Address
from slicewise.control.actors import internal
from slicewise.core.errors import SlicewiseError
from slicewise.runtime.steady_clock import SteadyClock
from slicewise.server import protocol
from slicewise.server.server import listening, reached_at, serve
from slicewise.server.service import Service
from slicewise.store.memory import MemoryStore

Visit = Callable[["Visitor"], Awaitable[None]]


class Visitor:
    """A client with a socket and a token."""

    def __init__(self, service: Service, url: str) -> None:
        self.service = service
        self.writers: list[asyncio.StreamWriter] = []
        self.port = int(url.rsplit(":", 1)[1])
        file = service.admin_token
        assert file is not None
        self.head = f"host: x\r\nauthorization: Bearer {file.read_text().strip()}\r\n".encode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def leave(self) -> None:
        for writer in self.writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def say(self, data: bytes) -> bytes:
        """Send bytes and read until the server closes."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await reader.read()
        writer.close()
        return answer

    async def ask(self, line: str, body: bytes = b"", more: bytes = b"") -> bytes:
        length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n".encode()
        head = f"{line} HTTP/1.1\r\nconnection: close\r\n".encode() + self.head
        return await self.say(head + length + more + b"\r\n" + body)


def visited(tmp_path: Path, visit: Visit, **settings: object) -> Service:
    """Serve for as long as a visit takes, then end by signal."""
    clock = Clock()
    chosen = Settings(data=tmp_path, listen=Address("127.0.0.1", 0), **settings)  # type: ignore[arg-type]
    services: list[Service] = []

    async def run() -> None:
        service = Service(MemoryStore(clock), chosen, SteadyClock(clock, clock))
        services.append(service)
        visiting: list[asyncio.Task[None]] = []
        visitors: list[Visitor] = []

        async def come(url: str) -> None:
            visitors.append(Visitor(service, url))
            try:
                await visit(visitors[0])
            except asyncio.CancelledError:  # the server has ended already
                return
            finally:
                if not service.failed.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)

        def ready(url: str) -> None:
            visiting.append(asyncio.create_task(come(url)))

        try:
            await serve(service, listening(chosen.listen), ready)
            await visiting[0]
        finally:
            for task in visiting:
                task.cancel()
            for visitor in visitors:
                await visitor.leave()

    asyncio.run(run())
    return services[0]


def test_requests_over_a_socket(tmp_path: Path) -> None:
    async def visit(visitor: Visitor) -> None:
        made = await visitor.ask("POST /v1/nodes", b'{"name":"n1","model":"a100","gpus":1}')
        assert made.startswith(b"HTTP/1.1 201")
        placed = await visitor.ask("POST /v1/allocations", b'{"profile":"1g.10gb"}')
        assert placed.startswith(b"HTTP/1.1 201")
        head = placed.split(b"\r\n\r\n")[0]
        assert b"server:" not in head
        assert b"\r\ncache-control: no-store\r\n" in head
        assert b"\r\nx-content-type-options: nosniff\r\n" in head

    service = visited(tmp_path, visit)
    assert service.runtime.address.startswith("http://127.0.0.1:")
    assert not service.runtime.leads


def test_an_answer_without_a_body(tmp_path: Path) -> None:
    async def visit(visitor: Visitor) -> None:
        answer = await visitor.ask("HEAD /v1/tokens/x")
        assert answer.startswith(b"HTTP/1.1 405")
        assert answer.endswith(b"\r\n\r\n")
        reader, writer = await visitor.connect()
        for path in (b"/healthz", b"/v1/events", b"/v1/nodes"):  # the connection stays open
            writer.write(b"HEAD " + path + b" HTTP/1.1\r\n" + visitor.head + b"\r\n")
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200")
            assert (b"\r\ncontent-length: " in answer) == (path != b"/v1/events")

    visited(tmp_path, visit)


def test_long_heads_are_refused(tmp_path: Path) -> None:
    async def visit(visitor: Visitor) -> None:
        fine = b"x-filler: " + b"x" * 1000 + b"\r\n"
        assert (await visitor.ask("GET /healthz", more=fine)).startswith(b"HTTP/1.1 200")
        whole = b"x-filler: " + b"x" * 4000 + b"\r\n"
        for answer in (
            await visitor.ask("GET /healthz", more=whole),
            await visitor.ask("GET /healthz?" + "x" * 4000),
            await visitor.say(b"GET /healthz HTTP/1.1\r\nx-endless: " + b"x" * 9000),
        ):
            assert answer.startswith(b"HTTP/1.1 431"), answer[:100]
            assert b"application/problem+json" in answer
        # A body may be longer than a head.
        body = b'{"profile":"1g.10gb"' + b" " * 6000 + b"}"
        assert (await visitor.ask("POST /v1/allocations", body)).startswith(b"HTTP/1.1 409")

    visited(tmp_path, visit, head_bytes=2048)


def test_malformed_requests_are_refused(tmp_path: Path) -> None:
    async def visit(visitor: Visitor) -> None:
        for junk in (
            b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
            b"GET http:///\xff HTTP/1.1\r\nhost: x\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        ):
            answer = await visitor.say(junk)
            assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 404"), junk
        upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n"
        reader, writer = await visitor.connect()
        writer.write(b"GET /v1/whoami HTTP/1.1\r\n" + visitor.head + upgrade + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")

    visited(tmp_path, visit)


def test_long_bodies_are_refused(tmp_path: Path) -> None:
    async def visit(visitor: Visitor) -> None:
        head = b"POST /v1/allocations HTTP/1.1\r\n" + visitor.head
        head += b"content-type: application/json\r\n"
        # A declared length is refused before the body arrives.
        reader, writer = await visitor.connect()
        writer.write(head + b"content-length: 99999999\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        # An undeclared one is refused when it becomes too long; the rest is discarded.
        reader, writer = await visitor.connect()
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n" + chunk * 5 + b"0\r\n\r\n")
        answer = await reader.readuntil(b"}")
        assert answer.startswith(b"HTTP/1.1 413")
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")

    visited(tmp_path, visit)


def test_trailers_are_ignored_and_limited(tmp_path: Path) -> None:
    async def visit(visitor: Visitor) -> None:
        asked = b"POST /v1/allocations HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        # A header that a proxy would remove must not pass as a trailer.
        late = visitor.head.removeprefix(b"host: x\r\n")
        reader, writer = await visitor.connect()
        writer.write(asked + b"2\r\n{}\r\n0\r\n" + late + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        for endless in (b"0\r\n" + b"x: y\r\n" * 100, b"0\r\nx: " + b"y" * 400, b"2;" + b"y" * 400):
            reader, writer = await visitor.connect()
            writer.write(asked)
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            with contextlib.suppress(ConnectionError):
                for piece in (endless, *[endless.removeprefix(b"0\r\n")] * 20):
                    writer.write(piece)
                    await asyncio.sleep(0)
                await reader.read()  # until it is closed

    visited(tmp_path, visit, head_bytes=2048)


def test_slow_requests_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "REQUEST_SECONDS", 0.05)

    async def visit(visitor: Visitor) -> None:
        assert await visitor.say(b"") == b""
        assert await visitor.say(b"GET /healthz HT") == b""
        head = b"POST /v1/allocations HTTP/1.1\r\n" + visitor.head
        head += b"content-type: application/json\r\ncontent-length: 10\r\n\r\n"
        assert await visitor.say(head + b"{") == b""
        # An idle persistent connection is not among them.
        reader, writer = await visitor.connect()
        for _ in range(2):
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.1)

    visited(tmp_path, visit)


def test_a_client_that_does_not_read_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.05)

    async def visit(visitor: Visitor) -> None:
        runtime = visitor.service.runtime
        reader, writer = await visitor.connect()
        writer.write(b"GET /v1/events HTTP/1.1\r\n" + visitor.head + b"\r\n")
        await reader.readuntil(b"retry")
        # The client stops reading while the journal grows.
        from slicewise.control.commands import SetTenant
        from slicewise.journal.entries import QuotaRecord

        number = 0
        while visitor.service.context.streams.open:
            for _ in range(100):
                number += 1
                await runtime.submit(
                    SetTenant(f"t{number}", QuotaRecord(), new=True), internal("x" * 1000)
                )
            await asyncio.sleep(0.01)

    visited(tmp_path, visit)


def test_a_client_that_leaves_a_small_answer_unread_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel holds most of its answers, and the service the small rest."""
    monkeypatch.setattr(protocol, "UNREAD_SECONDS", 0.05)
    ended = asyncio.Event()
    made: list[asyncio.Transport] = []

    class Watched(protocol.GuardedProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            made.append(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended.set()

    monkeypatch.setattr(protocol, "GuardedProtocol", Watched)

    async def visit(visitor: Visitor) -> None:
        _, writer = await visitor.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not made or not made[0].get_write_buffer_size():
            writer.write(b"GET /v1/models HTTP/1.1\r\n" + visitor.head + b"\r\n")
            await asyncio.sleep(0.001)
        assert made[0].get_write_buffer_size() < 1 << 16
        await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)

    visited(tmp_path, visit)


def test_a_slow_reader_is_not_aborted() -> None:
    class Transport:
        size = 1 << 20
        aborted = False

        def get_write_buffer_size(self) -> int:
            return self.size

        def abort(self) -> None:
            self.aborted = True

    async def read() -> None:
        transport = Transport()
        slow = protocol.GuardedProtocol.__new__(protocol.GuardedProtocol)
        slow.loop = asyncio.get_running_loop()
        slow.transport = transport  # type: ignore[assignment]
        slow._start_unread_timer()
        for _ in range(3):
            transport.size -= protocol.MIN_READ
            slow._stop_unread_timer()
            slow._check_unread()
            assert not transport.aborted
        slow._stop_unread_timer()
        slow._check_unread()
        assert transport.aborted

    asyncio.run(read())


def test_an_event_stream_ends_with_the_server(tmp_path: Path) -> None:
    async def visit(visitor: Visitor) -> None:
        reader, writer = await visitor.connect()
        writer.write(b"GET /v1/events?after=0 HTTP/1.1\r\n" + visitor.head + b"\r\n")
        text = await reader.readuntil(b"token-issued")
        assert b"text/event-stream" in text
        streams.append(reader)

    streams: list[asyncio.StreamReader] = []
    service = visited(tmp_path, visit)
    assert service.context.streams.open == 0
    assert len(streams) == 1


def test_a_wildcard_address_becomes_the_host_name() -> None:
    host = socket.gethostname()
    assert reached_at("https://0.0.0.0:1") == f"https://{host}:1"
    assert reached_at("https://[::]:1") == f"https://{host}:1"
    assert reached_at("http://127.0.0.1:1") == "http://127.0.0.1:1"


def test_an_address_in_use(tmp_path: Path) -> None:
    taken = listening(Address("127.0.0.1", 0))
    port = taken.getsockname()[1]
    with pytest.raises(SlicewiseError, match=f"listen: cannot listen on 127.0.0.1:{port}"):
        listening(Address("127.0.0.1", port))
    taken.close()
    with pytest.raises(SlicewiseError, match="listen: cannot listen"):
        listening(Address("no.such.host.invalid", 0))


def test_an_invalid_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pem").write_text("nonsense")

    async def visit(visitor: Visitor) -> None:
        raise AssertionError("the server must not start")

    with pytest.raises(SlicewiseError, match=r"tls\.cert"):
        visited(tmp_path, visit, tls_cert=tmp_path / "pem", tls_key=tmp_path / "pem")


def test_a_failure_ends_the_server(tmp_path: Path) -> None:
    async def visit(visitor: Visitor) -> None:
        visitor.service.runtime.fail("a fatal error")
        await asyncio.Event().wait()

    with pytest.raises(SlicewiseError, match="a fatal error"):
        visited(tmp_path, visit)
