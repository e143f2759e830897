"""Write docs/cli.md: every command and option, as `--help` prints them.

    .venv/bin/python docs/make_cli_reference.py

A test compares the file with what this script would write, so run it after changing a command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from slicewise.cli.kubectl import PROGRAM, app
from slicewise.cli.main import command

TARGET = Path(__file__).resolve().parent / "cli.md"

INTRODUCTION = """\
# Command reference

<!-- Written by docs/make_cli_reference.py: do not edit, run it again. -->

`make setup` installs the command as `.venv/bin/slicewise`. This page shows the output of
`slicewise COMMAND --help`.

- Results go to standard output, progress and notices to standard error; `--json` prints the
  results as a JSON document.
- The same arguments and the same `--seed` give the same results, for any number of `--workers`.
- Ctrl-C stops a simulation; the results are then those of the runs that all policies have finished.
- An error is one line on standard error that begins with `slicewise: error:`.
- Exit status: 0 for results, 2 for an error or no results, 130 if interrupted before there are
  results, 141 if the output is no longer read (`slicewise ls | head -1`).
"""


def reference() -> str:
    """Return the whole page."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        plugin = typer.main.get_command(app)
        parts = [
            INTRODUCTION,
            *_sections(command, "slicewise", None),
            *_sections(plugin, PROGRAM, None),
        ]
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width
    return "\n".join(parts)


def _sections(command: Any, name: str, parent: Any) -> Iterator[str]:
    """A section for a command, then one for each of its subcommands that is not hidden."""
    context = command.make_context(name, [], parent, resilient_parsing=True)
    help_text = "\n".join(line.rstrip() for line in context.get_help().splitlines())
    yield f"## {context.command_path}\n\n```text\n{help_text}\n```\n"
    command = context.command
    for child_name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        child = command.get_command(context, child_name)
        if not child.hidden:
            yield from _sections(child, child_name, context)


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"Written: {TARGET}")
