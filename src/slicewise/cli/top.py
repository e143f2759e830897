"""`slicewise top`: an overview of a service, once or live."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.formatting import show_json
from slicewise.cli.options import AsJson
from slicewise.cli.top_screen import screen
from slicewise.core.errors import SlicewiseError


def top(
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Refresh interval.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Watch a service: GPUs slice by slice, free capacity, queue and rates."""
    if not 0.1 <= interval <= 3600:
        raise SlicewiseError(f"interval must be 0.1 to 3600 seconds, not {interval}")
    console = Console(highlight=False)
    if json or once or not console.is_terminal or console.is_dumb_terminal:
        with connect(server, token_file) as client:
            view, policy = client.cluster(gpus=True), client.policy()
        if json:
            show_json(view)
        else:
            console.print(screen(view, console, policy=policy))
        return
    from slicewise.cli.top_live import watch  # asyncio, which --once does not need

    watch(console, interval, server, token_file)
