"""How the things of a service are told in a terminal: columns, places, moments."""

from __future__ import annotations

import json as json_module
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import typer

from slicewise.cli.output import as_json
from slicewise.core.request import Need

if TYPE_CHECKING:
    import msgspec

    from slicewise.control.entries import Part
    from slicewise.control.wire import AllocationView, NodeView

_GAP = "  "
_NUMBER = re.compile(r"[+-]?[0-9]+(?:[./][0-9]+)?|")
_NARROWEST = 24
"""The last column is folded no narrower than this."""


def show_json(document: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
    """Print what the service said, as JSON for people and machines."""
    import msgspec

    typer.echo(as_json(json_module.loads(msgspec.json.encode(document))), nl=False)


def json_line(document: msgspec.Struct) -> str:
    """The same in one line, where there may be no end to wait for."""
    import msgspec

    plain = json_module.loads(msgspec.json.encode(document))
    return json_module.dumps(plain, separators=(",", ":"))


def say(document: msgspec.Struct, json: bool, sentence: str) -> None:
    """Tell what became of a request, in a line or as JSON."""
    if json:
        show_json(document)
    else:
        typer.echo(sentence)


def clean(text: str) -> str:
    """Text of somebody else, without what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fold(text: str, indent: int) -> str:
    """A long line broken between words, where somebody looks at it."""
    width = max(terminal_width(), indent + _NARROWEST)
    lines = textwrap.wrap(
        text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(lines) if len(text) > width else text


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]], nothing: str = "") -> None:
    """Print rows in columns, numbers to the right; or what to say when there are none.

    A column with nothing in it is left out. Only the last one is ever folded, and only where
    somebody looks at it: what goes into a pipe has one line a row.
    """
    if not rows:
        typer.echo(nothing)
        return
    table = zip(*([clean(cell) for cell in row] for row in (header, *rows)), strict=True)
    columns = [column for column in table if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    to_the_right = [all(map(_NUMBER.fullmatch, column[1:])) for column in columns]
    indent = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    for number, row in enumerate(zip(*columns, strict=True)):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, to_the_right, strict=True)
        )
        typer.secho(fold(_GAP.join(cells).rstrip(), indent), bold=number == 0)


def terminal_width() -> int:
    """How many characters fit into a line; any number where nobody looks."""
    looked_at = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if looked_at else 1 << 30


def place(part: Part) -> str:
    """Where an instance is."""
    return f"{part.profile} on {part.node} GPU {part.gpu} at slice {part.start}"


def holds_of(node: NodeView) -> str:
    """Why a node takes less than it could, in a few words."""
    words = list(node.holds)
    if node.held_gpus:
        words.append("1 GPU" if node.held_gpus == 1 else f"{node.held_gpus} GPUs")
    return ", ".join(words)


def wanted(one: AllocationView) -> str:
    """What was asked for."""
    want = one.wanted
    need = None if want.need is None else Need(want.need.compute, want.need.memory_gb)
    return want_text(want.profile or need or "", want.models, one.count)


def want_text(want: str | Need, models: Sequence[str], count: int) -> str:
    """A request in a few words."""
    times = f"{count} x " if count > 1 else ""
    on = f" on {' or '.join(models)}" if models else ""
    return f"{times}{want}{on}"


def short(moment: str | None, now: datetime | None = None) -> str:
    """A moment not half a day away by its time, another by its date; UTC."""
    if moment is None:
        return ""
    day, _, clock = moment.partition("T")
    away = abs(datetime.fromisoformat(moment) - (now or datetime.now(UTC)))
    return clock[:8] if away < timedelta(hours=12) else day


def ending(one: AllocationView) -> str:
    """The state of an allocation, and why it ended if that says more."""
    plain = one.cause in (None, one.state) or (one.state, one.cause) == ("releasing", "released")
    return one.state if plain else f"{one.state} ({one.cause})"


def pairs(labels: dict[str, str]) -> str:
    """Labels as they are given."""
    return " ".join(f"{key}={value}" for key, value in labels.items())
