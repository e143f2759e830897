"""`slicewise queue`: the lines of the queue, its requests, and why one of them waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from slicewise.cli import completion
from slicewise.cli.connection import DEFAULT_SERVER, Server, TokenFile, connect
from slicewise.cli.formatting import (
    clean,
    fold,
    print_columns,
    short,
    show_json,
    want_text,
    wanted,
)
from slicewise.cli.options import AsJson
from slicewise.core.errors import SlicewiseError
from slicewise.core.request import Need

if TYPE_CHECKING:
    from slicewise.api.allocations import AllocationView, LineView, WaitView
    from slicewise.api.nodes import ReservedView

_INDENT = 4
"""Of the rest of a folded line of an explanation."""


def queue(
    requests: Annotated[
        bool, typer.Option("--requests", help="List the single requests, oldest first.")
    ] = False,
    why: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Explain why this request waits.",
            autocompletion=completion.allocations,
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List the queue: one line for each tenant and kind of request, in fair order."""
    if why is not None and requests:
        raise SlicewiseError("--why explains one request, --requests lists all: give one of them")
    with connect(server, token_file) as client:
        if why is not None:
            one = client.allocation(why, plan=True)
            if json:
                show_json(one)
            else:
                for line in _explanation(one):
                    typer.echo(fold(clean(line), _INDENT))
        elif requests:
            waiting = list(client.queue())
            if json:
                show_json(waiting)
            else:
                _print_requests(waiting)
        else:
            lines = client.queue_lines()
            if json:
                show_json(lines)
            else:
                _print_lines(lines)


def _print_lines(lines: tuple[LineView, ...]) -> None:
    rows = [
        (
            line.tenant,
            _line_wanted(line),
            str(line.waiting),
            short(line.oldest),
            short(line.expected_at),
            f"{line.reason}: {line.detail}",
        )
        for line in lines
    ]
    header = ("Tenant", "Request", "Waiting", "Oldest", "Expected", "Why the first waits")
    print_columns(header, rows, "the queue is empty")


def _print_requests(waiting: list[AllocationView]) -> None:
    rows = [
        (
            one.id,
            one.tenant,
            wanted(one),
            str(one.priority),
            short(one.requested_at),
            short(one.waiting.deadline) if one.waiting else "",
            str(one.waiting.position or "") if one.waiting else "",
            short(one.waiting.expected_at) if one.waiting else "",
            one.waiting.reason if one.waiting else "",
        )
        for one in waiting
    ]
    header = (
        "Allocation", "Tenant", "Request", "Priority", "Since", "Until", "Place", "Expected", "Why",
    )  # fmt: skip
    print_columns(header, rows, "the queue is empty")


def _line_wanted(line: LineView) -> str:
    want = line.wanted
    need = None if want.need is None else Need(want.need.compute, want.need.memory_gb)
    return want_text(want.profile or need or "", want.models, line.count)


def _explanation(one: AllocationView) -> Iterator[str]:
    """Yield three to six lines on why a request waits."""
    if one.waiting is None:
        yield f"{one.id} does not wait: it is {one.state}"
        return
    waits = one.waiting
    yield f"{one.id} waits for {wanted(one)} of {one.tenant}, since {short(one.requested_at)}"
    yield f"  why: {waits.reason}: {waits.detail}"
    held = _held(waits)
    if held:
        yield f"  reserved: {held}"
    if waits.repack is not None:
        yield f"  moves: {waits.repack.detail}"
    yield f"  place: {_place(waits)}"
    gives_up = f"gives up at {waits.deadline}" if waits.deadline else "does not give up"
    yield f"  expected: {waits.expected_at or 'not known'}; it {gives_up}"


def _held(waits: WaitView) -> str:
    """Describe the reserved windows that matter to a request, its own or those of others."""
    return "; ".join(map(_window, waits.kept_from))


def _window(window: ReservedView) -> str:
    where = f"GPU {window.gpu} of {window.node} from slice {window.start}"
    whose = "for another tenant" if window.tenant is None else f"for {window.tenant}"
    opens = "" if window.opens_at is None else f", which opens at {window.opens_at}"
    return f"{where} {whose}{opens}"


def _place(waits: WaitView) -> str:
    ahead = (
        "requests of other tenants come first"
        if waits.others_ahead
        else "no other tenant comes first"
    )
    return f"number {waits.position} in its line; {ahead}"
