"""Terminal output of the service commands: columns, JSON, placements and times.

Columns are printed without Rich: importing it takes a quarter of a command's start.
"""

from __future__ import annotations

import json as json_module
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import typer

from slicewise.cli.output import as_json
from slicewise.core.request import Need

if TYPE_CHECKING:
    import msgspec

    from slicewise.api.allocations import AllocationView
    from slicewise.api.nodes import NodeView
    from slicewise.journal.entries import Part

_GAP = "  "
_NUMBER = re.compile(r"[+-]?[0-9]+(?:[./][0-9]+)?|")
_NARROWEST = 24
"""The last column is folded no narrower than this."""
_NAME_WIDTH = 11


def show_json(document: msgspec.Struct | Sequence[msgspec.Struct]) -> None:
    """Print a reply of the service as indented JSON."""
    import msgspec

    typer.echo(as_json(json_module.loads(msgspec.json.encode(document))), nl=False)


def json_line(document: msgspec.Struct) -> str:
    """Return a reply as one line of JSON, for streams."""
    import msgspec

    plain = json_module.loads(msgspec.json.encode(document))
    return json_module.dumps(plain, separators=(",", ":"))


def print_result(document: msgspec.Struct, json: bool, sentence: str) -> None:
    """Print the result of a command, as a sentence or as JSON."""
    if json:
        show_json(document)
    else:
        typer.echo(sentence)


def clean(text: str) -> str:
    """Escape control characters in text from the service."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fold(text: str, indent: int) -> str:
    """Wrap a long line between words if the output is a terminal."""
    width = max(terminal_width(), indent + _NARROWEST)
    lines = textwrap.wrap(
        text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(lines) if len(text) > width else text


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]], nothing: str = "") -> None:
    """Print rows in columns, numbers right-aligned; print ``nothing`` if there are none.

    Empty columns are omitted. Only the last column wraps, and only on a terminal: piped output
    has one complete line per row.
    """
    if not rows:
        typer.echo(nothing)
        return
    table = zip(*([clean(cell) for cell in row] for row in (header, *rows)), strict=True)
    columns = [column for column in table if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    right_aligned = [all(map(_NUMBER.fullmatch, column[1:])) for column in columns]
    indent = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    for number, row in enumerate(zip(*columns, strict=True)):
        cells = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, right_aligned, strict=True)
        )
        typer.secho(fold(_GAP.join(cells).rstrip(), indent), bold=number == 0)


def facts(pairs: Iterable[tuple[str, str | None]]) -> str:
    """Format names and values, one line each; empty values are omitted."""
    return "\n".join(
        fold(f"{name:<{_NAME_WIDTH}}{clean(value)}", _NAME_WIDTH) for name, value in pairs if value
    )


def terminal_width() -> int:
    """Return the width of the terminal; unlimited if the output is not one."""
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if terminal else 1 << 30


def place(part: Part) -> str:
    """Describe the placement of an instance."""
    return f"{part.profile} on {part.node} GPU {part.gpu} at slice {part.start}"


def holds_of(node: NodeView) -> str:
    """Summarize why a node or some of its GPUs accept nothing new."""
    words = list(node.holds)
    if node.held_gpus:
        words.append("1 GPU" if node.held_gpus == 1 else f"{node.held_gpus} GPUs")
    return ", ".join(words)


def wanted(one: AllocationView) -> str:
    """Describe the requested instances."""
    want = one.wanted
    need = None if want.need is None else Need(want.need.compute, want.need.memory_gb)
    return want_text(want.profile or need or "", want.models, one.count)


def want_text(want: str | Need, models: Sequence[str], count: int) -> str:
    """Describe a request in a few words."""
    times = f"{count} x " if count > 1 else ""
    on = f" on {' or '.join(models)}" if models else ""
    return f"{times}{want}{on}"


def short(moment: str | None, now: datetime | None = None) -> str:
    """Shorten a UTC timestamp: the time if within 12 hours of now, else the date."""
    if moment is None:
        return ""
    day, _, clock = moment.partition("T")
    away = abs(datetime.fromisoformat(moment) - (now or datetime.now(UTC)))
    return clock[:8] if away < timedelta(hours=12) else day


def ending(one: AllocationView) -> str:
    """Return the state of an allocation, with the cause if it adds something."""
    plain = one.cause in (None, one.state) or (one.state, one.cause) == ("releasing", "released")
    return one.state if plain else f"{one.state} ({one.cause})"


def pairs(labels: dict[str, str]) -> str:
    """Format labels as KEY=VALUE."""
    return " ".join(f"{key}={value}" for key, value in labels.items())
