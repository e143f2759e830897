"""Finding GPU models by name: the built-in ones and those of a user's files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from slicewise.catalog.entry import Entry
from slicewise.catalog.schema import parse_entry
from slicewise.core.errors import GeometryError, SlicewiseError, UnknownNameError
from slicewise.core.geometry import Geometry

MAX_FILE_BYTES = 1 << 20
"""No description of a GPU is larger; a file beyond it is something else."""


class Catalog:
    """The GPU models that can be named: the built-in ones, and any loaded from files.

    Built-in files are read when first needed, since reading them all takes longer than most
    commands do. A catalog never changes: ``with_file`` makes another.
    """

    def __init__(self, own: Iterable[Entry] = ()) -> None:
        """The built-in models and these, the last of two with the same name."""
        self._own = {name_key(entry.model): entry for entry in own}

    @classmethod
    def builtin(cls) -> Catalog:
        """The models slicewise comes with."""
        return _BUILTIN

    def with_file(self, path: str | Path) -> Catalog:
        """This catalog and the model of a file, which replaces one of the same name."""
        entry = load_file(path)
        for index, alias in enumerate(entry.aliases):
            owner = self._lookup(name_key(alias))
            if owner is not None and name_key(owner.model) != name_key(entry.model):
                raise GeometryError(
                    f"{path}: aliases[{index}]", f"{alias!r} already names {owner.model}"
                )
        return Catalog((*self._own.values(), entry))

    def find(self, name: str) -> Entry:
        """The model of that name or alias; case does not matter, nor dashes for spaces."""
        entry = self._lookup(name_key(name))
        if entry is None:
            # The near names are found here: compared as keys, so that case does not matter.
            known = {name_key(known): known for e in self.entries() for known in e.names}
            near = [known[key] for key in get_close_matches(name_key(name), known, cutoff=0.5)]
            advice = f"did you mean {' or '.join(near)}?" if near else "try `slicewise geometry`"
            raise UnknownNameError("GPU model", name, known=(), hint=advice)
        return entry

    def entries(self) -> tuple[Entry, ...]:
        """Every model, by name."""
        everything = (*self._own.values(), *self._builtin_entries(_builtin_files()))
        return tuple(sorted(everything, key=lambda entry: _natural(entry.model)))

    def _lookup(self, key: str) -> Entry | None:
        """The entry with that key: files before built-ins, names before aliases."""
        if key in self._own:
            return self._own[key]
        for entry in self._own.values():
            if key in map(name_key, entry.aliases):
                return entry
        keys = _builtin_files()
        if key in keys:
            return _builtin_entry(key)
        # An alias mostly begins like the name it stands for: those files first.
        first_word = key.split("-")[0]
        likely_first = sorted(keys, key=lambda stem: not stem.startswith(first_word))
        for entry in self._builtin_entries(likely_first):
            if key in map(name_key, entry.aliases):
                return entry
        return None

    def _builtin_entries(self, keys: Iterable[str]) -> Iterator[Entry]:
        """The built-in entries of these keys, read one by one, without those replaced."""
        return (_builtin_entry(key) for key in keys if key not in self._own)


_BUILTIN = Catalog()


def load_geometry(name_or_path: str | Path) -> Geometry:
    """The geometry of a built-in model, or of the model a file describes.

    >>> load_geometry("a100").model
    'A100-80GB'
    """
    return load_entry(name_or_path).require()


def load_entry(name_or_path: str | Path, catalog: Catalog | None = None) -> Entry:
    """A model of a catalog, the built-in one unless given, or that of a file.

    Text ending in ``.toml`` or with a slash is a path.
    """
    if isinstance(name_or_path, Path) or re.search(r"[/\\]|\.toml$", name_or_path.casefold()):
        return load_file(name_or_path)
    return (catalog or Catalog.builtin()).find(name_or_path)


def load_file(path: str | Path) -> Entry:
    """The model a TOML file describes; whatever is wrong with the file is said in one line."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:  # A path with a NUL in it.
        raise SlicewiseError(f"{str(path)!r} is not a path") from None
    return _parse(raw, str(path))


def _parse(raw: bytes, where: str) -> Entry:
    """The entry in a file's bytes."""
    if len(raw) > MAX_FILE_BYTES:
        raise SlicewiseError(f"{where}: larger than {MAX_FILE_BYTES:,} bytes, so not a GPU model")
    try:
        data = tomllib.loads(raw.decode("utf-8-sig"))  # Some editors put a mark in front.
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SlicewiseError(f"{where}: line {line} is not UTF-8 text") from None
    except RecursionError:
        raise SlicewiseError(f"{where}: not TOML slicewise can read: nested too deeply") from None
    except ValueError as error:  # Mostly TOMLDecodeError, which names the line.
        raise SlicewiseError(f"{where}: not TOML: {error}") from None
    return parse_entry(data, where)


def name_key(name: str) -> str:
    """A name as it is compared: small letters, dashes between the words, no maker in front."""
    words = re.sub(r"[\s_-]+", "-", name.strip().casefold())
    return words.removeprefix("nvidia-")


@cache
def _builtin_files() -> dict[str, Traversable]:
    """The built-in files by key: each is named after its model."""
    folder = files("slicewise.catalog") / "models"
    return {
        file.name.removesuffix(".toml"): file
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    }


@cache
def _builtin_entry(key: str) -> Entry:
    """One built-in model; read once, so that its geometry is one object everywhere."""
    file = _builtin_files()[key]
    return _parse(file.read_bytes(), file.name)


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which A30 comes before A100."""
    parts = re.findall(r"(\d+)|(\D+)", name.casefold())
    return [(int(digits), "") if digits else (-1, word) for digits, word in parts]
