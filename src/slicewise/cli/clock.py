"""`slicewise clock`: service time beside the wall clock, and accepting a step of the latter."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.nodes import lists
from slicewise.cli.options import AsJson
from slicewise.cli.telling import say

_CONTEXT: Any = {"help_option_names": ["-h", "--help"]}
clock = typer.Typer(context_settings=_CONTEXT, rich_markup_mode=None, add_completion=False)


@clock.callback(invoke_without_command=True)
def _show(
    context: typer.Context,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Show service time, by which leases end, and the wall clock; or accept a step."""
    if not lists(context):
        return
    with connect(server, token_file) as client:
        both = client.clock()
    step = "held: service time does not follow" if both.held else "followed"
    told = (
        f"service  {both.service_time}\n"
        f"wall     {both.wall_time}\n"
        f"step     {both.step_seconds:+.3f} s, {step}"
    )
    say(both, json, told)


@clock.command("accept")
def _accept(
    step: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="The step as seen; unless given, the server asked is looked at."
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Let service time go on from the leader's wall clock; what is over by then ends."""
    with connect(server, token_file) as client:
        seen = client.clock().step_seconds if step is None else step
        moved = client.accept_clock(seen)
    say(moved, json, f"service time {moved.before} is now {moved.after}")
