"""Write docs/cli.md: every command and option, as `--help` prints them.

    .venv/bin/python docs/make_cli_reference.py

A test compares the file with what this script would write, so run it after changing a command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slicewise.cli.main import command

TARGET = Path(__file__).resolve().parent / "cli.md"

INTRODUCTION = """\
# Command reference

<!-- Written by docs/make_cli_reference.py: do not edit, run it again. -->

`make setup` installs the command as `.venv/bin/slicewise`. What is said here is what
`slicewise COMMAND --help` prints.

- Results go to standard output, progress and notices to standard error; `--json` makes the
  results a JSON document.
- The same arguments and the same `--seed` give the same results, whatever `--workers` says.
- Ctrl-C stops a simulation; the results are then of the runs that every policy had finished.
- Mistakes are answered with one line on standard error that begins with `slicewise: error:`.
- Exit status: 0 when there are results, 2 when something was refused or there is nothing to show,
  130 when interrupted elsewhere, 141 when the output is no longer read (`slicewise ls | head -1`).
"""


def reference() -> str:
    """The whole page."""
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"
    try:
        parts = [INTRODUCTION, *_sections(command, "slicewise", None)]
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
