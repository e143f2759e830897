"""The catalog: finds GPU models by name, built in or from a user's files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from slicewise.catalog.entry import CatalogEntry
from slicewise.catalog.fields import parse_toml, read_file
from slicewise.catalog.schema import parse_entry
from slicewise.core.errors import GeometryError, UnknownNameError
from slicewise.core.geometry import Geometry


class Catalog:
    """The known GPU models: the built-in ones and those loaded from files.

    Built-in files are read at first use, because reading all of them takes longer than most
    commands. A catalog is immutable: ``with_file`` returns another one.
    """

    def __init__(self, own: Iterable[CatalogEntry] = ()) -> None:
        """Add models to the built-in ones; of two with the same name, the last one counts."""
        self._own = {name_key(entry.model): entry for entry in own}

    @classmethod
    def builtin(cls) -> Catalog:
        """Return the catalog of built-in models."""
        return _BUILTIN

    def with_file(self, path: str | Path) -> Catalog:
        """Return this catalog with the model of a file, which replaces one of the same name."""
        entry = load_file(path)
        for index, alias in enumerate(entry.aliases):
            owner = self._lookup(name_key(alias))
            if owner is not None and name_key(owner.model) != name_key(entry.model):
                raise GeometryError(
                    f"{path}: aliases[{index}]", f"{alias!r} already names {owner.model}"
                )
        return Catalog((*self._own.values(), entry))

    def find(self, name: str) -> CatalogEntry:
        """Return the model with a name or alias; case and dashes for spaces are ignored."""
        entry = self._lookup(name_key(name))
        if entry is None:
            # Near names are compared as keys, which ignores case.
            known = {name_key(known): known for e in self.entries() for known in e.names}
            near = [known[key] for key in get_close_matches(name_key(name), known, cutoff=0.5)]
            advice = f"did you mean {' or '.join(near)}?" if near else "try `slicewise geometry`"
            raise UnknownNameError("GPU model", name, known=(), hint=advice)
        return entry

    def entries(self) -> tuple[CatalogEntry, ...]:
        """Return every model, sorted by name."""
        everything = (*self._own.values(), *self._builtin_entries(_builtin_files()))
        return tuple(sorted(everything, key=lambda entry: _natural(entry.model)))

    def _lookup(self, key: str) -> CatalogEntry | None:
        """Find an entry: files before built-in models, names before aliases."""
        if key in self._own:
            return self._own[key]
        for entry in self._own.values():
            if key in map(name_key, entry.aliases):
                return entry
        keys = _builtin_files()
        if key in keys:
            return _builtin_entry(key)
        # An alias mostly begins like the model's name: read those files first.
        first_word = key.split("-")[0]
        likely_first = sorted(keys, key=lambda stem: not stem.startswith(first_word))
        for entry in self._builtin_entries(likely_first):
            if key in map(name_key, entry.aliases):
                return entry
        return None

    def _builtin_entries(self, keys: Iterable[str]) -> Iterator[CatalogEntry]:
        """Read built-in entries one by one, without those that a file replaces."""
        return (_builtin_entry(key) for key in keys if key not in self._own)


_BUILTIN = Catalog()


def load_geometry(name_or_path: str | Path) -> Geometry:
    """Return the geometry of a built-in model, or of the model in a file.

    >>> load_geometry("a100").model
    'A100-80GB'
    """
    return load_entry(name_or_path).require()


def load_entry(name_or_path: str | Path, catalog: Catalog | None = None) -> CatalogEntry:
    """Return a model of a catalog (by default the built-in one) or of a file.

    Text that ends in ``.toml`` or contains a slash is a path.
    """
    if isinstance(name_or_path, Path) or re.search(r"[/\\]|\.toml$", name_or_path.casefold()):
        return load_file(name_or_path)
    return (catalog or Catalog.builtin()).find(name_or_path)


def load_file(path: str | Path) -> CatalogEntry:
    """Return the model that a TOML file describes; every error is one line."""
    return _parse(read_file(path), str(path))


def _parse(raw: bytes, where: str) -> CatalogEntry:
    _, data = parse_toml(raw, where, "a GPU model")
    return parse_entry(data, where)


def name_key(name: str) -> str:
    """Normalize a name: lower case, dashes between words, no leading "nvidia"."""
    words = re.sub(r"[\s_-]+", "-", name.strip().casefold())
    return words.removeprefix("nvidia-")


@cache
def _builtin_files() -> dict[str, Traversable]:
    """Return the built-in files by key; each is named after its model."""
    folder = files("slicewise.catalog") / "models"
    return {
        file.name.removesuffix(".toml"): file
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }


@cache
def _builtin_entry(key: str) -> CatalogEntry:
    """Read a built-in model once, so that its geometry is the same object everywhere."""
    file = _builtin_files()[key]
    return _parse(file.read_bytes(), file.name)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts A30 before A100."""
    parts = re.findall(r"(\d+)|(\D+)", name.casefold())
    return [(int(digits), "") if digits else (-1, word) for digits, word in parts]
