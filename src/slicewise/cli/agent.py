"""`slicewise agent`: the node agent, and discovery of what this machine's driver offers."""

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
            help="The service; separate several addresses with commas.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SLICEWISE_TOKEN_FILE", metavar="FILE", help="File with this node's token."
        ),
    ] = None,
    state: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the agent's records.")
    ] = _STATE,
    cdi: Annotated[Path, typer.Option(metavar="DIR", help="Folder for CDI specifications.")] = _CDI,
    enable_mig: Annotated[
        list[str] | None,
        typer.Option(metavar="UUID", help="Enable MIG mode on this GPU; may be repeated."),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CA certificates to verify the service with."),
    ] = None,
    client_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="This node's client certificate, in place of a token."),
    ] = None,
    client_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The key of the client certificate.")
    ] = None,
    ignore_manager: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run beside this other MIG manager; may be repeated."),
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log lines as JSON.")] = False,
    discover: Annotated[
        bool, typer.Option("--discover", help="Print what the driver offers; change nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --discover: print JSON.")] = False,
) -> None:
    """Run the node agent: create and destroy MIG instances as the scheduler decides."""
    from slicewise.agent.__main__ import run_agent, run_discovery

    if discover:
        typer.echo(run_discovery(json), nl=False)
        return
    if json:
        raise SlicewiseError("--json requires --discover")
    status = run_agent(
        server, token_file, state, cdi, enable_mig or (), ca, ignore_manager or (), json_logs,
        client_cert, client_key,
    )  # fmt: skip
    raise typer.Exit(status)
