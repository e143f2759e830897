"""The live screen of `slicewise top`: redraws at an interval and counts events meanwhile."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from slicewise.cli.connection import PATIENCE, credentials, with_advice
from slicewise.cli.top_screen import DETAILED_GPUS, EventRates, screen
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.client import AsyncClient, ClusterView, PolicyStatus

_RECONNECT_SECONDS = 2.0


def watch(console: Console, interval: float, server: str, token_file: Path | None) -> None:
    """Watch a service until interrupted."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(console, interval, server, token_file))


async def _watch(console: Console, interval: float, server: str, token_file: Path | None) -> None:
    """Fetch and draw in a loop while another task counts events."""
    with with_advice(server, token_file):
        from slicewise.client import AsyncClient

        token, verify = credentials(server, token_file)
        async with AsyncClient(server, token, patience=PATIENCE, verify=verify) as client:
            view, policy = await _fetch(client, None)
            event_rates = EventRates(time.monotonic())
            counting = asyncio.create_task(_count_events(client, event_rates))
            problem = ""
            try:
                with Live(console=console, screen=True, auto_refresh=False) as live:
                    while True:
                        rates = None if event_rates.stalled else event_rates.rates(time.monotonic())
                        live.update(screen(view, console, rates, problem, policy), refresh=True)
                        await asyncio.sleep(interval)
                        try:
                            (view, policy), problem = await _fetch(client, view), ""
                        except SlicewiseError as error:
                            problem = _transient(error)  # keep showing the last view
            finally:
                counting.cancel()
                await asyncio.wait({counting})


async def _fetch(client: AsyncClient, last: ClusterView | None) -> tuple[ClusterView, PolicyStatus]:
    """Fetch the cluster, with single GPUs unless there are too many to show, and the policy."""
    cluster = await client.cluster(gpus=last is None or last.gpus <= DETAILED_GPUS)
    return cluster, await client.policy()


async def _count_events(client: AsyncClient, event_rates: EventRates) -> None:
    """Count events; reconnect for as long as the screen is open."""
    while True:
        with suppress(SlicewiseError):  # the drawing loop reports it
            async for event in client.events():
                event_rates.count(time.monotonic(), event.kind)
        event_rates.stalled = True
        await asyncio.sleep(_RECONNECT_SECONDS)


def _transient(error: SlicewiseError) -> str:
    """Return the text of a transient error; raise any other."""
    from slicewise.client import ApiError, UnreachableError

    busy = isinstance(error, ApiError) and error.status >= 429
    if not busy and not isinstance(error, UnreachableError):
        raise error
    return str(error)
