"""Look up the GPU models, policies and distributions that options name."""

from __future__ import annotations

from pathlib import Path

from slicewise.catalog import Catalog, CatalogEntry, load_entry, load_file
from slicewise.cli.options import DEFAULT_MODEL
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.lab.mix import Mix, parse_mix
from slicewise.policies.base import Policy
from slicewise.policies.registry import check_different, policy


def catalog_with(files: list[Path] | None) -> Catalog:
    """The built-in models and those of the user's files."""
    catalog = Catalog.builtin()
    for file in files or ():
        catalog = catalog.with_file(file)
    return catalog


def chosen_geometry(model: str | None, files: list[Path] | None) -> Geometry:
    """The named model, or that of the last file, or the default."""
    if model is None:
        model = load_file(files[-1]).model if files else DEFAULT_MODEL
    return chosen_entry(model, files).require()


def chosen_entry(model: str, files: list[Path] | None) -> CatalogEntry:
    """The model of that name, or the one of the file at that path."""
    return load_entry(model, catalog_with(files))


def chosen_policies(names: list[str]) -> tuple[Policy, ...]:
    """Policies, one per option or separated by commas."""
    policies = tuple(policy(name.strip()) for given in names for name in given.split(","))
    check_different(policies)
    return policies


def chosen_mixes(names: list[str], geometry: Geometry) -> tuple[Mix, ...]:
    """Distributions, one per option."""
    for name in names:
        if names.count(name) > 1:
            raise SlicewiseError(f"distribution {name!r} is named twice")
    return tuple(parse_mix(name, geometry) for name in names)
