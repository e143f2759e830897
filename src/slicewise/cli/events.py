"""`slicewise events`: the event stream, one line per event."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Annotated

import typer

from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.formatting import json_line
from slicewise.cli.options import AsJson
from slicewise.core.errors import SlicewiseError


def events(
    after: Annotated[
        int | None,
        typer.Option(metavar="SEQ", help="Start after this event; 0 starts with the first."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(metavar="N", help="Stop after this many; without it, never.")
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Stream events as they happen; reconnect when the connection breaks."""
    if count is not None and count < 1:
        raise SlicewiseError(f"count must be at least 1, not {count}")
    if after is not None and after < 0:
        raise SlicewiseError(f"after must be at least 0, not {after}")
    with connect(server, token_file) as client:
        from slicewise.cli.event_text import event_line
        from slicewise.client import ResyncError

        seen = 0
        with suppress(KeyboardInterrupt):  # the usual way to stop
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
                    typer.echo(f"slicewise: {error}; continuing with new events", err=True)
                    after = None
