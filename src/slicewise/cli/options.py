"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from slicewise.catalog import Catalog, Entry, load_entry, load_file
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.policies.base import Policy
from slicewise.policies.registry import check_different, policy
from slicewise.sim.mix import Mix, parse_mix

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


def catalog_with(files: list[Path] | None) -> Catalog:
    """The built-in models and those of the user's files."""
    catalog = Catalog.builtin()
    for file in files or ():
        catalog = catalog.with_file(file)
    return catalog


def chosen_geometry(model: str | None, files: list[Path] | None) -> Geometry:
    """The model named, or the one the last file describes, or the default."""
    if model is None:
        model = load_file(files[-1]).model if files else DEFAULT_MODEL
    return chosen_entry(model, files).require()


def chosen_entry(model: str, files: list[Path] | None) -> Entry:
    """The model of that name, or the one of the file at that path."""
    return load_entry(model, catalog_with(files))


def chosen_policies(names: list[str]) -> tuple[Policy, ...]:
    """Policies given one an option, or several with commas between."""
    policies = tuple(policy(name.strip()) for given in names for name in given.split(","))
    check_different(policies)
    return policies


def chosen_mixes(names: list[str], geometry: Geometry) -> tuple[Mix, ...]:
    """Distributions, one an option."""
    for name in names:
        if names.count(name) > 1:
            raise SlicewiseError(f"distribution {name!r} is named twice")
    return tuple(parse_mix(name, geometry) for name in names)


def positive_workers(workers: int | None) -> int | None:
    """Refuse a number of workers that cannot be."""
    if workers is not None and not 1 <= workers <= 1024:
        raise SlicewiseError(f"workers must be 1 to 1024, not {workers}")
    return workers
