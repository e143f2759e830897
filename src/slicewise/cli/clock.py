"""`slicewise clock`: service time and wall clock, and accepting a step of the wall clock."""

from __future__ import annotations

from typing import Annotated

import typer

from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.formatting import print_result
from slicewise.cli.options import AsJson, command_group, without_subcommand

clock = command_group()


@clock.callback(invoke_without_command=True)
def _show(
    context: typer.Context,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show service time, which leases follow, and the wall clock; or accept a step."""
    if not without_subcommand(context):
        return
    with connect(server, token_file) as client:
        both = client.clock()
    step = "held: service time does not follow" if both.held else "followed"
    text = (
        f"service  {both.service_time}\n"
        f"wall     {both.wall_time}\n"
        f"step     {both.step_seconds:+.3f} s, {step}"
    )
    print_result(both, json, text)


@clock.command("accept")
def _accept(
    step: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="The expected step (default: as the server reports it)."
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Set service time to the leader's wall clock; leases that expire by then end."""
    with connect(server, token_file) as client:
        seen = client.clock().step_seconds if step is None else step
        moved = client.accept_clock(seen)
    print_result(moved, json, f"service time {moved.before} is now {moved.after}")
