"""The service: assembles store, runtime and app, and runs the periodic tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slicewise.catalog import Catalog
from slicewise.config.logs import logger
from slicewise.config.settings import Settings
from slicewise.control.ports import Store
from slicewise.core.errors import SlicewiseError
from slicewise.runtime.rehearsals import Rehearse
from slicewise.runtime.runtime import Runtime
from slicewise.runtime.source import Source
from slicewise.runtime.steady_clock import SteadyClock
from slicewise.server.app import App, Route, Router
from slicewise.server.bootstrap import prepare, token_file, write_marker
from slicewise.server.context import AppContext
from slicewise.server.openapi import document
from slicewise.server.requests import ASGIApp
from slicewise.server.routes.table import ROUTES

log = logger()

_TICK_SECONDS = 5.0
_POLL_SECONDS = 0.01
_SUMMARY_SECONDS = 10.0
_CLOCK_SECONDS = 0.1
"""Interval between comparisons of the wall clock; short, to detect short steps."""


class Service:
    """One process of slicewise over a store. Start it, then serve its ``app``."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        steady: SteadyClock | None = None,
        timer: Callable[[], float] = time.perf_counter,
        pages: ASGIApp | None = None,
        routes: Sequence[Route] = (),
        companions: Sequence[Callable[[AppContext], Coroutine[Any, Any, None]]] = (),
        source: Source | None = None,
        rehearse: Rehearse | None = None,
    ) -> None:
        """``pages`` answers paths outside the API, such as those of the dashboard.

        ``routes`` are additional routes. ``companions`` are coroutines that run as long as the
        service. ``source`` is the system whose state the store holds, if it is not this service.
        ``rehearse`` rehearses tables in another process.
        """
        catalog = Catalog.builtin()
        for file in settings.geometry:
            catalog = catalog.with_file(file)
        self.settings = settings
        self.runtime = Runtime(store, settings, steady, timer, source)
        self.context = AppContext(self.runtime, settings, catalog, rehearse)
        all_routes = (*ROUTES, *routes)
        self.context.document = msgspec.json.encode(document(all_routes))
        self.app = App(self.context, Router(all_routes), pages)
        self.failed = asyncio.Event()
        """Set when the process has failed; ``runtime.failure`` holds the reason."""
        self._companions = companions
        self._tasks: list[asyncio.Task[None]] = []
        self._rehearsing: asyncio.Task[None] | None = None

    @property
    def admin_token(self) -> Path | None:
        """The file with the admin token; None without a data folder."""
        folder = self.settings.data
        return None if folder is None else token_file(folder)

    async def start(self, address: str | None = None) -> None:
        """Load the journal and start; return when the process leads and is ready, or follows."""
        if address is not None:
            self.runtime.address = address
        self.runtime.on_failure = self.failed.set
        self.runtime.on_started_leading = self._begin_leading
        self.runtime.on_batch = self.context.metrics.count_batch
        self.runtime.on_followed = self.context.metrics.count_followed
        await self.runtime.start()
        self._tasks.append(asyncio.create_task(self._tick()))
        self._tasks.append(asyncio.create_task(self._summarize()))
        self._tasks.append(asyncio.create_task(self._watch_clock()))
        self._tasks.append(asyncio.create_task(self.context.recent_stats.run()))
        self._tasks.append(asyncio.create_task(self.context.sign_in.run()))
        self._rehearsing = asyncio.create_task(self.context.rehearsals.run())
        for companion in self._companions:
            self._tasks.append(asyncio.create_task(companion(self.context)))
        runtime = self.runtime
        while runtime.leads and not runtime.furnished and runtime.failure is None:
            await asyncio.sleep(_POLL_SECONDS)
        if self.runtime.failure is not None:
            raise SlicewiseError(self.runtime.failure)
        if runtime.state.seq > 0:
            await self._write_marker()

    async def stop(self) -> None:
        """Complete running commands, give up the lease and stop."""
        for task in self._tasks:
            task.cancel()
        if self._rehearsing is not None:
            self._rehearsing.cancel()
            await asyncio.wait({self._rehearsing})  # its process ends with it
        await self.runtime.stop()

    def close_streams(self) -> None:
        """End event streams, so that the server can wait for its connections to close."""
        self.runtime.stopping = True
        self.runtime.replica.notify()

    def _begin_leading(self) -> None:
        self.context.liveness.begin()
        self._tasks.append(asyncio.create_task(self._prepare()))

    async def _prepare(self) -> None:
        try:
            await prepare(self.runtime, self.settings.data)
        except SlicewiseError as error:
            if self.runtime.leads:
                self.runtime.fail(str(error))
            return
        await self._write_marker()
        self.runtime.furnished = True

    async def _summarize(self) -> None:
        try:
            while True:
                await asyncio.sleep(_SUMMARY_SECONDS)
                self.context.auth_failures.summarize()
        finally:
            self.context.auth_failures.summarize()

    async def _watch_clock(self) -> None:
        while True:
            self.runtime.check_clock()
            await asyncio.sleep(_CLOCK_SECONDS)

    async def _write_marker(self) -> None:
        folder = self.settings.data
        if folder is not None and self.runtime.source is None:
            await self.runtime.in_thread(write_marker, folder, self.runtime.history)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self.settings.agents_lost_seconds / 4))
            self.runtime.expire_submissions()
            self.context.liveness.check_agents()
