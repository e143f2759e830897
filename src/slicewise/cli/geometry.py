"""`slicewise geometry`: list the GPU models, or draw the slice map of one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from slicewise.cli.choices import catalog_with, chosen_entry
from slicewise.cli.geometry_drawing import draw_model, list_models, model_as_json, models_as_json
from slicewise.cli.options import AsJson, GeometryFiles
from slicewise.cli.output import as_json


def geometry(
    model: Annotated[
        str | None, typer.Argument(help="Draw the slice map of this model, by name or by file.")
    ] = None,
    geometry: GeometryFiles = None,
    json: AsJson = False,
) -> None:
    """List every GPU model, or draw the slice map of one with every profile's legal starts."""
    if model is None:
        catalog = catalog_with(geometry)
        if json:
            typer.echo(as_json(models_as_json(catalog)), nl=False)
        else:
            list_models(catalog, Console())
        return
    entry = chosen_entry(model, geometry)
    if json:
        typer.echo(as_json(model_as_json(entry)), nl=False)
    else:
        draw_model(entry, Console())
