"""`slicewise geometry`: which GPU models are known, and what one of them allows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from slicewise.cli.geometry import draw_model, list_models, model_as_json, models_as_json
from slicewise.cli.options import AsJson, GeometryFiles, catalog_with
from slicewise.cli.output import as_json


def geometry(
    model: Annotated[str | None, typer.Argument(help="Draw this model's slice map.")] = None,
    geometry: GeometryFiles = None,
    json: AsJson = False,
) -> None:
    """List every GPU model, or draw the slice map of one with every profile's legal starts."""
    catalog = catalog_with(geometry)
    if json:
        document = models_as_json(catalog) if model is None else model_as_json(catalog.find(model))
        typer.echo(as_json(document), nl=False)
    elif model is None:
        list_models(catalog, Console())
    else:
        draw_model(catalog.find(model), Console())
