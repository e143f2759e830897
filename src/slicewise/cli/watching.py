"""`slicewise events` and `top`: watching a service."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from slicewise.cli.connection import DEFAULT_SERVER, PATIENCE, Server, TokenFile, connect, helpful
from slicewise.cli.connection import token as token_of
from slicewise.cli.options import AsJson
from slicewise.cli.screen import DETAILED_GPUS, Pulse, screen
from slicewise.cli.telling import json_line, show_json
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.client import AsyncClient, ClusterView

_AGAIN_SECONDS = 2.0


def events(
    after: Annotated[
        int | None,
        typer.Option(metavar="SEQ", help="From behind this event on; 0 is from the first."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(metavar="N", help="End after so many; otherwise go on for ever.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show what happens in a service as it happens; a broken connection is taken up again."""
    if count is not None and count < 1:
        raise SlicewiseError(f"count must be at least 1, not {count}")
    if after is not None and after < 0:
        raise SlicewiseError(f"after must be at least 0, not {after}")
    with connect(server, token_file) as client:
        from slicewise.cli.event_text import event_line
        from slicewise.client import ResyncError

        seen = 0
        with suppress(KeyboardInterrupt):  # the usual way to stop looking
            while True:
                try:
                    with closing(client.events(after)) as stream:
                        for event in stream:
                            typer.echo(json_line(event) if json else event_line(event))
                            seen += 1
                            if seen == count:
                                return
                except ResyncError as error:
                    if after is not None and not seen:
                        raise
                    typer.echo(f"slicewise: {error}; here it goes on from now", err=True)
                    after = None


def top(
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="How often to look.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Watch a service: its GPUs slice by slice, what is left, who waits, how fast it goes."""
    if not 0.1 <= interval <= 3600:
        raise SlicewiseError(f"interval must be 0.1 to 3600 seconds, not {interval}")
    console = Console(highlight=False)
    if json or once or not console.is_terminal or console.is_dumb_terminal:
        with connect(server, token_file) as client:
            view = client.cluster(gpus=True)
        if json:
            show_json(view)
        else:
            console.print(screen(view, console))
        return
    try:
        asyncio.run(_watch(console, interval, server, token_file))
    except KeyboardInterrupt:
        return


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
