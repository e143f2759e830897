"""Reading a TOML table field by field, so that every mistake is named by its place.

A table is read with ``take``, which checks one field with a reader (``integer``, ``text``, ...);
``finish`` then refuses every field nobody asked for, so that a misspelt one cannot go unnoticed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar, overload

from slicewise.core.errors import GeometryError

T = TypeVar("T")
D = TypeVar("D")
Reader = Callable[[object, str], T]
"""Takes a value and the path it stands at; returns it checked, or raises GeometryError."""

LARGEST = 10**9
"""No figure of a GPU is larger; beyond it, even printing a number can fail."""

_REQUIRED = object()
"""Stands for the default of a field that has none."""

_BARE = re.compile(r"[A-Za-z0-9_-]{1,40}")


class Table:
    """A TOML table being read; its path is put before every error."""

    def __init__(self, data: object, path: str) -> None:
        """Refuse anything but a table; ``path`` ends where a field's name can follow."""
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
        """The checked value of one field, or its default where there is one."""
        self._known.append(key)
        if key in self.data:
            return read(self.data[key], self.path + key)
        if default is _REQUIRED:
            raise GeometryError(self.path + key, "is missing")
        return default

    def finish(self) -> None:
        """Refuse the fields that were not read."""
        for key in self.data:
            if key not in self._known:
                near = difflib.get_close_matches(str(key), self._known, n=1)
                advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(self._known)}"
                raise GeometryError(self.path + shown(key), f"no such field; {advice}")


def integer(value: object, path: str) -> int:
    """A whole number of a sane size."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise GeometryError(path, f"needs a whole number, not {kind(value)}")
    _check_size(value, path)
    return value


def count(value: object, path: str) -> int:
    """A whole number that is not negative."""
    number = integer(value, path)
    if number < 0:
        raise GeometryError(path, f"{number} is negative")
    return number


def amount(value: object, path: str) -> float:
    """A number, whole or not, that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GeometryError(path, f"needs a number, not {kind(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise GeometryError(path, f"{value} is not a finite number")
    _check_size(value, path)
    if value < 0:
        raise GeometryError(path, f"{value} is negative")
    return value


def text(value: object, path: str) -> str:
    """Words on one line; line breaks become spaces."""
    if not isinstance(value, str):
        raise GeometryError(path, f"needs text, not {kind(value)}")
    words = " ".join(value.split())
    if not words:
        raise GeometryError(path, "is empty")
    if not words.isprintable():
        raise GeometryError(path, "holds characters that cannot be printed")
    return words


def device_id(value: object, path: str) -> str:
    """A PCI device id, written like 0x20B5."""
    words = text(value, path)
    if not re.fullmatch(r"0x[0-9A-Fa-f]{4}", words):
        raise GeometryError(path, f"{words!r} is not a PCI device id such as 0x20B5")
    return words


def list_of(read: Reader[T]) -> Reader[tuple[T, ...]]:
    """A reader of arrays whose elements ``read`` accepts."""

    def read_list(value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise GeometryError(path, f"needs an array, not {kind(value)}")
        return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(value))

    return read_list


def shown(key: object) -> str:
    """A field's name as it can stand in a message: quoted unless it is plain."""
    if isinstance(key, str) and _BARE.fullmatch(key):
        return key
    quoted = ascii(key)
    return quoted if len(quoted) <= 40 else quoted[:37] + "..."


def kind(value: object) -> str:
    """What a value is, in TOML's words."""
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
