"""The catalog of GPU models, one TOML file each in ``models/``.

Entry points: `load_geometry`, by name or by the path of a user's file, and `Catalog`. This room
imports `core` only.
"""

from slicewise.catalog.entry import Confidence, Engines, Entry, Level, ProfileFacts
from slicewise.catalog.library import Catalog, load_entry, load_file, load_geometry
from slicewise.catalog.schema import parse_entry

__all__ = [
    "Catalog",
    "Confidence",
    "Engines",
    "Entry",
    "Level",
    "ProfileFacts",
    "load_entry",
    "load_file",
    "load_geometry",
    "parse_entry",
]
