"""The `slicewise` command: all subcommands, and the one place that turns errors into a line."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

import slicewise
from slicewise.cli.commands import commands
from slicewise.core.errors import SlicewiseError

_app = typer.Typer(
    name="slicewise",
    help="Fragmentation-aware scheduling of NVIDIA Multi-Instance GPUs.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@_app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(f"slicewise {slicewise.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


command = typer.main.get_command(_app)
"""The whole command line."""
assert isinstance(command, TyperGroup)
for _lazy in commands():
    command.add_command(_lazy)


def run(
    arguments: Sequence[str] | None = None, which: Any = command, name: str = "slicewise"
) -> None:
    """Run the command line and exit: 0 success, 2 error, 130 interrupted, 141 broken pipe."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack characters
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(exit_status(sys.argv[1:] if arguments is None else arguments, which, name))


def exit_status(arguments: Sequence[str], which: Any = command, name: str = "slicewise") -> int:
    """Run the command line; print errors as one line."""
    try:
        status = which(list(arguments), prog_name=name, standalone_mode=False)
    except SlicewiseError as error:
        return _refuse(str(error), name)
    except typer.TyperException as error:
        return _refuse(_usage_problem(error), name)
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return 130
    except SystemExit as end:
        # The reader closed the pipe (`slicewise ... | head`), and Rich or Typer exited. This is no
        # error; the status is that of any tool ended by SIGPIPE.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        # Drop buffered output, or Python complains about it at exit.
        sys.stdout = None
        return 128 + signal.SIGPIPE
    except ModuleNotFoundError as error:
        if error.name not in _LAB_PACKAGES:
            raise
        return _refuse(f"{error.name} is not installed: install slicewise[lab]")
    except OSError as error:
        # A full disk, for instance: buffered output cannot be written either.
        sys.stdout = None
        where = "" if error.filename is None else f"{error.filename!r}: "
        return _refuse(f"{where}{error.strerror or error}")
    except MemoryError:
        return _refuse("not enough memory for this; try fewer --gpus or --workers")
    return status if isinstance(status, int) else 0


_LAB_PACKAGES = ("llvmlite", "numba", "matplotlib", "pyarrow", "jinja2")
"""Packages of the extra `lab`, imported at first use; other extras report themselves."""


def _usage_problem(error: typer.TyperException) -> str:
    formatted = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "slicewise"
    return f"{formatted.strip()} (see '{command} --help')"


def _refuse(problem: str, name: str = "slicewise") -> int:
    one_line = " ".join(problem.split())
    typer.echo(f"{name}: error: {one_line}", err=True)
    return 2
