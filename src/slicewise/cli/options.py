"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from slicewise.core.errors import SlicewiseError

DEFAULT_MODEL = "A100-80GB"

GeometryFiles = Annotated[
    list[Path] | None,
    typer.Option("--geometry", metavar="FILE", help="A TOML file that describes a GPU model."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help=f"GPU model (default {DEFAULT_MODEL}, or the one of --geometry).",
    ),
]
Gpus = Annotated[int, typer.Option(metavar="N", help="GPUs in the cluster.")]
Seed = Annotated[int, typer.Option(metavar="N", help="The same seed gives the same result.")]
CsvFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the rows to this file.")
]
PlotFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write a plot: .png or .svg.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Worker processes (default: one per core); results do not depend on it.",
    ),
]


_CONTEXT: Any = {"help_option_names": ["-h", "--help"]}


def command_group() -> typer.Typer:
    """A command with subcommands."""
    return typer.Typer(context_settings=_CONTEXT, rich_markup_mode=None, add_completion=False)


def without_subcommand(context: typer.Context) -> bool:
    """Return whether no subcommand is given; reject options before one, which would be lost."""
    command = context.invoked_subcommand
    if command is None:
        return True
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise SlicewiseError(f"put {option} after {command!r}, not before it")
    return False


class ExperimentName(StrEnum):
    """The experiments by name."""

    PUBLISHED = "published"
    STEADY = "steady"
    QUEUEING = "queueing"


def positive_workers(workers: int | None) -> int | None:
    """Check the number of workers."""
    if workers is not None and not 1 <= workers <= 1024:
        raise SlicewiseError(f"workers must be 1 to 1024, not {workers}")
    return workers
