"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from slicewise.core.errors import SlicewiseError

DEFAULT_MODEL = "A100-80GB"

GeometryFiles = Annotated[
    list[Path] | None,
    typer.Option("--geometry", metavar="FILE", help="A TOML file with a GPU model of your own."),
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
PlotFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it: .png or .svg.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Worker processes (default: one a core); the result is the same."
    ),
]


class ExperimentName(StrEnum):
    """The experiments by name."""

    PUBLISHED = "published"
    STEADY = "steady"


def positive_workers(workers: int | None) -> int | None:
    """Refuse a number of workers that cannot be."""
    if workers is not None and not 1 <= workers <= 1024:
        raise SlicewiseError(f"workers must be 1 to 1024, not {workers}")
    return workers
