"""A service in the process of the test: a store in memory, a manual clock, and callers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from slicewise.config.settings import Settings
from slicewise.control.ports import Store
from slicewise.runtime.rehearsals import Rehearse
from slicewise.runtime.steady_clock import SteadyClock
from slicewise.server.service import Service
from slicewise.store.memory import MemoryStore

T = TypeVar("T")

A100 = {"name": "n1", "model": "A100-80GB", "gpus": 2}


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Harness:
    """One or several services over one store, with methods that call them."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    store: Store | None = None
    clock: Clock = field(default_factory=Clock)
    rehearse: Rehearse | None = None

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = self.store or MemoryStore(self.clock)
        self.services: list[Service] = []
        self.ticks = 0.0
        self.service = self.open("first")
        self.admin = (self.folder / "first" / "admin-token").read_text().strip()

    def open(self, name: str, address: str = "", **settings: Any) -> Service:
        """Start another service over the same store."""
        assert self.store is not None
        # The timer is frozen, so a rate limit would never end.
        rates = {"strangers_per_second": 1e6, "agent_requests_per_second": 1e6}
        chosen = {"lease_seconds": 0.5} | rates | self.settings | settings
        made = Service(
            self.store,
            Settings(data=self.folder / name, **chosen),
            SteadyClock(self.clock, self.clock),
            lambda: self.ticks,
            rehearse=self.rehearse,
        )
        self.services.append(made)
        self.run(made.start(address or f"http://{name}"))
        return made

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop of the services."""
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        """Stop everything."""
        for service in self.services:
            self.run(service.stop())
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Run the services until a condition holds."""

        async def look() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.run(look())

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: str | None = "",
        key: str | None = None,
        headers: dict[str, str] | None = None,
        service: Service | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
    ) -> httpx.Response:
        """Send a request with the admin's token, another token, or none (None)."""
        sent = dict(headers or {})
        secret = self.admin if token == "" else token
        if secret is not None:
            sent["authorization"] = f"Bearer {secret}"
        if key is not None:
            sent["idempotency-key"] = key
        if body is not None:
            content = json.dumps(body).encode()
        if content is not None:
            sent.setdefault("content-type", "application/json")

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport((service or self.service).app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, headers=sent, content=content)

        return self.run(ask())

    def raw(
        self, method: str, url: str, headers: dict[str, str], content: bytes | None
    ) -> httpx.Response:
        """Send a request with exactly these headers and this content."""

        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.service.app)
            async with httpx.AsyncClient(transport=transport) as client:
                encoded = [
                    (name.encode(), value.encode("latin-1")) for name, value in headers.items()
                ]
                return await client.request(method, url, headers=encoded, content=content)

        return self.run(ask())

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a GET request."""
        return self.call("GET", path, **options)

    def post(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        """Send a POST request."""
        return self.call("POST", path, body, **options)

    def delete(self, path: str, **options: Any) -> httpx.Response:
        """Send a DELETE request."""
        return self.call("DELETE", path, **options)

    def node(self, **changes: Any) -> Any:
        """Register a node."""
        answer = self.post("/v1/nodes", A100 | changes)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def tenant(self, name: str, **quota: Any) -> str:
        """Create a tenant, and return a token of it."""
        answer = self.post("/v1/tenants", {"name": name, "quota": quota})
        assert answer.status_code == 201, answer.text
        return self.token("tenant", tenant=name)

    def token(self, role: str, **options: Any) -> str:
        """Issue a token, and return its secret."""
        answer = self.post("/v1/tokens", {"role": role} | options)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["token"])

    def place(self, profile: str = "1g.10gb", **options: Any) -> Any:
        """Create an allocation that must be placed."""
        call = {name: options.pop(name) for name in ("token", "key") if name in options}
        answer = self.post("/v1/allocations", {"profile": profile} | options, **call)
        assert answer.status_code == 201, answer.text
        return answer.json()

    @asynccontextmanager
    async def stream(
        self, path: str, token: str | None = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[Reader]:
        """Open an event stream, and close it at the end."""
        target, _, query = path.partition("?")
        sent = {"authorization": f"Bearer {token or self.admin}"} | (headers or {})
        left = asyncio.Event()
        reader = Reader()
        first = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if first:
                return first.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "method": "GET",
            "path": target,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }
        task = asyncio.create_task(self.service.app(scope, receive, reader.take))
        try:
            yield reader
        finally:
            left.set()
            await task


class Reader:
    """The received part of an event stream."""

    def __init__(self) -> None:
        self.status = 0
        self.ended = False
        self.paused: asyncio.Event | None = None
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._buffer = b""

    async def take(self, message: Any) -> None:
        """Receive an ASGI message from the application."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if self.paused is not None:
            await self.paused.wait()
        self.ended = not message.get("more_body")
        await self._queue.put(message["body"])

    async def block(self) -> str:
        """The next block of lines."""
        while b"\n\n" not in self._buffer:
            self._buffer += await self._queue.get()
        block, _, self._buffer = self._buffer.partition(b"\n\n")
        return block.decode()

    async def block_or_end(self) -> None:
        """Wait for the next chunk."""
        self._buffer += await self._queue.get()

    async def event(self) -> dict[str, Any]:
        """The next event: its id, its kind and its data."""
        while True:
            fields = dict(
                line.split(": ", 1)
                for line in (await self.block()).splitlines()
                if not line.startswith(":")
            )
            if "data" in fields:
                return fields | {"data": msgspec.json.decode(fields["data"])}
