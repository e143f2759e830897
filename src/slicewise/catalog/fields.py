"""Reads TOML files field by field; every error names the file and the path of the field.

``Table.take`` checks one field with a reader (``integer``, ``text``, ...). ``Table.finish`` then
rejects every field that was not taken, with the nearest known name.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar, overload

from slicewise.core.errors import GeometryError, SlicewiseError

T = TypeVar("T")
D = TypeVar("D")
Reader = Callable[[object, str], T]
"""Checks the value at a path and returns it, or raises GeometryError."""

LARGEST = 10**9
"""Maximum of every number: no figure of a GPU is larger, and huge ones cannot be printed."""
MAX_FILE_BYTES = 1 << 20

_REQUIRED = object()
"""The default of a required field."""

_BARE = re.compile(r"[A-Za-z0-9_-]{1,40}")


def read_file(path: str | Path) -> bytes:
    """Return the content of a file, or the beginning of one that is too large."""
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:  # a path with a NUL
        raise SlicewiseError(f"{str(path)!r} is not a path") from None


def parse_toml(raw: bytes, where: str, what: str) -> tuple[str, dict[str, object]]:
    """Return the text and the data of a TOML file; ``what`` is what it should describe."""
    if len(raw) > MAX_FILE_BYTES:
        raise SlicewiseError(f"{where}: larger than {MAX_FILE_BYTES:,} bytes, so not {what}")
    try:
        text = raw.decode("utf-8-sig")  # some editors write a byte order mark
        return text, tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SlicewiseError(f"{where}: line {line} is not UTF-8 text") from None
    except RecursionError:
        raise SlicewiseError(f"{where}: not TOML slicewise can read: nested too deeply") from None
    except ValueError as error:  # mostly TOMLDecodeError, which names the line
        raise SlicewiseError(f"{where}: not TOML: {error}") from None


class Table:
    """A TOML table; its path precedes every error."""

    def __init__(self, data: object, path: str) -> None:
        """Reject anything but a table; a field's name can be appended to ``path``."""
        if not isinstance(data, Mapping):
            raise GeometryError(path.rstrip(": ."), f"needs a table, not {kind(data)}")
        self.data: Mapping[object, object] = data
        self.path = path
        self._known: list[str] = []

    @overload
    def take(self, key: str, read: Reader[T]) -> T: ...
    @overload
    def take(self, key: str, read: Reader[T], default: D) -> T | D: ...
    def take(self, key: str, read: Reader[T], default: object = _REQUIRED) -> object:
        """Return the checked value of a field, or its default if the field is absent."""
        self._known.append(key)
        if key in self.data:
            return read(self.data[key], self.path + key)
        if default is _REQUIRED:
            raise GeometryError(self.path + key, "is missing")
        return default

    def finish(self) -> None:
        """Reject the fields that were not taken."""
        for key in self.data:
            if key not in self._known:
                near = difflib.get_close_matches(str(key), self._known, n=1)
                advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(self._known)}"
                raise GeometryError(self.path + shown(key), f"no such field; {advice}")


def integer(value: object, path: str) -> int:
    """Read a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise GeometryError(path, f"needs a whole number, not {kind(value)}")
    _check_size(value, path)
    return value


def count(value: object, path: str) -> int:
    """Read a whole number that is not negative."""
    number = integer(value, path)
    if number < 0:
        raise GeometryError(path, f"{number} is negative")
    return number


def amount(value: object, path: str) -> float:
    """Read a number that is not negative, whole or not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GeometryError(path, f"needs a number, not {kind(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise GeometryError(path, f"{value} is not a finite number")
    _check_size(value, path)
    if value < 0:
        raise GeometryError(path, f"{value} is negative")
    return value


def text(value: object, path: str) -> str:
    """Read text; line breaks become spaces."""
    if not isinstance(value, str):
        raise GeometryError(path, f"needs text, not {kind(value)}")
    words = " ".join(value.split())
    if not words:
        raise GeometryError(path, "is empty")
    if not words.isprintable():
        raise GeometryError(path, "holds characters that cannot be printed")
    return words


def device_id(value: object, path: str) -> str:
    """Read a PCI device id such as 0x20B5."""
    words = text(value, path)
    if not re.fullmatch(r"0x[0-9A-Fa-f]{4}", words):
        raise GeometryError(path, f"{words!r} is not a PCI device id such as 0x20B5")
    return words


def list_of(read: Reader[T]) -> Reader[tuple[T, ...]]:
    """Return a reader of arrays with elements that ``read`` accepts."""

    def read_list(value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise GeometryError(path, f"needs an array, not {kind(value)}")
        return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(value))

    return read_list


def shown(key: object) -> str:
    """Format a field's name for a message: quoted unless it is a bare key."""
    if isinstance(key, str) and _BARE.fullmatch(key):
        return key
    quoted = ascii(key)
    return quoted if len(quoted) <= 40 else quoted[:37] + "..."


def kind(value: object) -> str:
    """Name the TOML type of a value."""
    names: tuple[tuple[type, str], ...] = (
        (bool, "true or false"),
        (int, "a whole number"),
        (float, "a fraction"),
        (str, "text"),
        (Mapping, "a table"),
        (list, "an array"),
    )
    for cls, name in names:
        if isinstance(value, cls):
            return name
    return f"a {type(value).__name__}"


def _check_size(value: float, path: str) -> None:
    if abs(value) > LARGEST:
        raise GeometryError(path, f"is beyond {LARGEST:,}")
