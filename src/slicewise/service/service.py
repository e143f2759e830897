"""The service as one thing to start, stop and talk to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from slicewise.catalog import Catalog
from slicewise.control.ports import Store
from slicewise.core.errors import SlicewiseError
from slicewise.service.app import App
from slicewise.service.beginning import leave_trace
from slicewise.service.first_start import furnish, token_file
from slicewise.service.logs import logger
from slicewise.service.openapi import document
from slicewise.service.plant import Plant
from slicewise.service.routes import Route, Router
from slicewise.service.settings import Settings
from slicewise.service.site import Site
from slicewise.service.source import Source
from slicewise.service.steady import SteadyClock
from slicewise.service.table import ROUTES

log = logger()

_TICK_SECONDS = 5.0
_LOOK_SECONDS = 0.01
_SUMMARY_SECONDS = 10.0
_CLOCK_SECONDS = 0.1
"""How often the wall clock is looked at, so that a short step is told as well."""


class Service:
    """One process of slicewise: give it a store, start it, and serve its ``app``."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        steady: SteadyClock | None = None,
        timer: Callable[[], float] = time.perf_counter,
        pages: ASGIApp | None = None,
        routes: Sequence[Route] = (),
        companions: Sequence[Callable[[Site], Coroutine[Any, Any, None]]] = (),
        source: Source | None = None,
    ) -> None:
        """``pages`` answers what is looked up outside the API, such as a dashboard's files.

        ``routes`` are served, and documented, beside the service's own. ``companions`` run as long
        as the service does. ``source`` is whose state the store holds, if it is not this service's.
        """
        catalog = Catalog.builtin()
        for file in settings.geometry:
            catalog = catalog.with_file(file)
        self.settings = settings
        self.plant = Plant(store, settings, steady, timer, source)
        self.site = Site(self.plant, settings, catalog)
        every = (*ROUTES, *routes)
        self.site.document = msgspec.json.encode(document(every))
        self.app = App(self.site, Router(every), pages)
        self.failed = asyncio.Event()
        """Set when the process cannot go on; ``plant.failure`` says why."""
        self._companions = companions
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def admin_token(self) -> Path | None:
        """The file with the admin token, where there is a folder for it."""
        folder = self.settings.data
        return None if folder is None else token_file(folder)

    async def start(self, address: str | None = None) -> None:
        """Read the journal and take part; returns when the process is ready, or follows."""
        if address is not None:
            self.plant.address = address
        self.plant.on_failure = self.failed.set
        self.plant.on_office = self._take_office
        self.plant.on_batch = self.site.metrics.count_batch
        self.plant.on_followed = self.site.metrics.count_followed
        await self.plant.start()
        self._tasks.append(asyncio.create_task(self._tick()))
        self._tasks.append(asyncio.create_task(self._summarize()))
        self._tasks.append(asyncio.create_task(self._watch_clock()))
        self._tasks.append(asyncio.create_task(self.site.history.run()))
        for companion in self._companions:
            self._tasks.append(asyncio.create_task(companion(self.site)))
        plant = self.plant
        while plant.leads and not plant.furnished and plant.failure is None:
            await asyncio.sleep(_LOOK_SECONDS)
        if self.plant.failure is not None:
            raise SlicewiseError(self.plant.failure)
        if plant.state.seq > 0:
            await self._leave_trace()

    async def stop(self) -> None:
        """Finish what was begun, step down, and end."""
        for task in self._tasks:
            task.cancel()
        await self.plant.stop()

    def close_streams(self) -> None:
        """Let event streams end, before the server waits for its connections."""
        self.plant.stopping = True
        self.plant.replica.wake()

    def _take_office(self) -> None:
        self.site.contacts.begin()
        self._tasks.append(asyncio.create_task(self._furnish()))

    async def _furnish(self) -> None:
        try:
            await furnish(self.plant, self.settings.data)
        except SlicewiseError as error:
            if self.plant.leads:
                self.plant.fail(str(error))
            return
        await self._leave_trace()
        self.plant.furnished = True

    async def _summarize(self) -> None:
        try:
            while True:
                await asyncio.sleep(_SUMMARY_SECONDS)
                self.site.failures.summarize()
        finally:
            self.site.failures.summarize()

    async def _watch_clock(self) -> None:
        while True:
            self.plant.look_at_clock()
            await asyncio.sleep(_CLOCK_SECONDS)

    async def _leave_trace(self) -> None:
        folder = self.settings.data
        if folder is not None and self.plant.source is None:
            await self.plant.in_thread(leave_trace, folder, self.plant.history)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(min(_TICK_SECONDS, self.settings.agents_lost_seconds / 4))
            self.plant.give_up_on_old()
            self.site.contacts.watch()
