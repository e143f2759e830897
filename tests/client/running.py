"""A service that listens on a port, in a thread of the test process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from slicewise.config.settings import Settings
from slicewise.server.service import Service
from slicewise.store.memory import MemoryStore


@dataclass(frozen=True)
class Running:
    """The URL of a service, and the file with its admin token."""

    url: str
    token_file: Path
    service: Service

    @property
    def token(self) -> str:
        """The admin token."""
        return self.token_file.read_text(encoding="utf-8").strip()


class _Server(uvicorn.Server):
    """A server that installs no signal handlers."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


async def _serve(
    store: MemoryStore,
    settings: Settings,
    listener: socket.socket,
    ready: Future[tuple[Service, asyncio.Event]],
) -> None:
    host, port = listener.getsockname()
    over = asyncio.Event()
    service = Service(store, settings)
    config = uvicorn.Config(
        service.app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=5
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        await service.start(f"http://{host}:{port}")
        ready.set_result((service, over))
        await over.wait()
    finally:
        service.close_streams()
        server.should_exit = True
        await serving
        await service.stop()


@contextmanager
def running(
    folder: Path, store: MemoryStore | None = None, port: int = 0, **settings: Any
) -> Iterator[Running]:
    """A service with only the default tenant, until the end of the block.

    Several on one store are a leader and its standbys.
    """
    # Agents and unknown clients in these tests send requests without pauses.
    free = {
        "agent_requests_per_second": 1e6,
        "hellos_per_minute": 1e6,
        "strangers_per_second": 1e6,
    }
    chosen = Settings(data=folder, **{"lease_seconds": 0.5} | free | settings)
    ready: Future[tuple[Service, asyncio.Event]] = Future()
    # The protocol is named so that small answers are not held back (TCP_NODELAY is set by it).
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def run() -> None:
        try:
            asyncio.run(_serve(store or MemoryStore(time.time), chosen, listener, ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run, name="service")
    thread.start()
    try:
        service, over = ready.result()
        try:
            yield Running(url, folder / "admin-token", service)
        finally:
            loop = service.runtime._loop
            assert loop is not None
            loop.call_soon_threadsafe(over.set)
    finally:
        thread.join()
