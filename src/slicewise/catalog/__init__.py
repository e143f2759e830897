"""The catalog of GPU models, one TOML file each in ``models/``; CONTRIBUTING.md has the steps.

Entry points: `load_geometry`, by name or by the path of a user's file, and `Catalog`. Imports
`core` only.
"""

from slicewise.catalog.entry import CatalogEntry, Confidence, Engines, Level, ProfileFacts
from slicewise.catalog.library import Catalog, load_entry, load_file, load_geometry
from slicewise.catalog.schema import parse_entry

__all__ = [
    "Catalog",
    "CatalogEntry",
    "Confidence",
    "Engines",
    "Level",
    "ProfileFacts",
    "load_entry",
    "load_file",
    "load_geometry",
    "parse_entry",
]
