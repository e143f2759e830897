"""The GPU models slicewise knows, and how to describe one it does not.

Each model is one TOML file in ``models/``; a user's own GPU is a file of the same form.
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
