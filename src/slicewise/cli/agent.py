"""`slicewise agent`: the node agent, and a look at what the driver of this machine offers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slicewise.core.errors import SlicewiseError

_STATE = Path("/var/lib/slicewise-agent")
_CDI = Path("/var/run/cdi")


def agent(
    server: Annotated[
        str | None,
        typer.Option(
            envvar="SLICEWISE_SERVER",
            metavar="URL",
            help="The service; several processes of it with commas between.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SLICEWISE_TOKEN_FILE", metavar="FILE", help="File with this node's token."
        ),
    ] = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="Folder for its records.")] = _STATE,
    cdi: Annotated[Path, typer.Option(metavar="DIR", help="Folder for CDI specifications.")] = _CDI,
    enable_mig: Annotated[
        list[str] | None,
        typer.Option(metavar="UUID", help="Switch MIG mode on for this GPU; may be repeated."),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificates the service's is checked against."),
    ] = None,
    ignore_manager: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Work although this other MIG manager is here; may be repeated."
        ),
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log lines as JSON.")] = False,
    discover: Annotated[
        bool, typer.Option("--discover", help="Print what the driver offers, and change nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --discover: print JSON.")] = False,
) -> None:
    """Make the MIG instances of this node as the scheduler decides."""
    from slicewise.agent.__main__ import look, start

    if discover:
        typer.echo(look(json), nl=False)
        return
    if json:
        raise SlicewiseError("--json goes with --discover")
    status = start(
        server, token_file, state, cdi, enable_mig or (), ca, ignore_manager or (), json_logs
    )
    raise typer.Exit(status)
