"""The live screen of `slicewise top`: drawn again and again while events are counted."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from slicewise.cli.connection import PATIENCE, helpful
from slicewise.cli.connection import token as token_of
from slicewise.cli.screen import DETAILED_GPUS, Pulse, screen
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.client import AsyncClient, ClusterView

_AGAIN_SECONDS = 2.0


def watch(console: Console, interval: float, server: str, token_file: Path | None) -> None:
    """Watch a service until interrupted."""
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(console, interval, server, token_file))


async def _watch(console: Console, interval: float, server: str, token_file: Path | None) -> None:
    """Look and draw, again and again, while another task counts what happens."""
    with helpful(server, token_file):
        from slicewise.client import AsyncClient

        async with AsyncClient(server, token_of(token_file), patience=PATIENCE) as client:
            view = await _look(client, None)
            pulse = Pulse(time.monotonic())
            listening = asyncio.create_task(_listen(client, pulse))
            trouble = ""
            try:
                with Live(console=console, screen=True, auto_refresh=False) as live:
                    while True:
                        rates = None if pulse.deaf else pulse.rates(time.monotonic())
                        live.update(screen(view, console, rates, trouble), refresh=True)
                        await asyncio.sleep(interval)
                        try:
                            view, trouble = await _look(client, view), ""
                        except SlicewiseError as error:
                            trouble = _passing(error)  # what was seen last stays
            finally:
                listening.cancel()
                await asyncio.wait({listening})


async def _look(client: AsyncClient, last: ClusterView | None) -> ClusterView:
    """The cluster, with single GPUs unless there were too many to show."""
    return await client.cluster(gpus=last is None or last.gpus <= DETAILED_GPUS)


async def _listen(client: AsyncClient, pulse: Pulse) -> None:
    """Count what happens; a service that is away for long may come back all the same."""
    while True:
        with suppress(SlicewiseError):  # whoever looks is told
            async for event in client.events():
                pulse.note(time.monotonic(), event.kind)
        pulse.deaf = True
        await asyncio.sleep(_AGAIN_SECONDS)


def _passing(error: SlicewiseError) -> str:
    """What to say about a service that may come back; raised where it will not."""
    from slicewise.client import ApiError, UnreachableError

    busy = isinstance(error, ApiError) and error.status >= 429
    if not busy and not isinstance(error, UnreachableError):
        raise error
    return str(error)
