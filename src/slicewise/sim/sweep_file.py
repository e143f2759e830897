"""Reading an experiment file: TOML, checked field by field, spanned to the points of a sweep."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from slicewise.catalog import load_geometry
from slicewise.catalog.fields import Reader, Table, amount, integer, kind, list_of, text
from slicewise.core.errors import GeometryError, SlicewiseError, UnknownNameError
from slicewise.policies.registry import check_different, policy
from slicewise.sim.experiment import Experiment, Published, Steady
from slicewise.sim.mix import parse_mix
from slicewise.sim.sweep import Sweep
from slicewise.sim.workload import Lifetime

T = TypeVar("T")

MAX_CELLS = 100_000
"""Points times distributions times policies; a larger sweep is most likely a slip."""
MAX_RUNS = 2_000_000
"""All runs of a sweep together: their results are held in memory, about a kilobyte each."""
_MAX_FILE_BYTES = 1 << 20

_ONLY = {
    "steady": ("loads", "duration", "warmup", "oracle"),
    "published": ("lifetime",),
}
"""By experiment: the fields that mean nothing to the other one."""


def load_sweep(path: str | Path) -> Sweep:
    """Read an experiment file; whatever is wrong with it is said in one line."""
    path = Path(path)
    raw = _read(path)
    table = Table(_parse(raw, path), f"{path}: ")
    name = table.take("experiment", _one_of("experiment", tuple(_ONLY)))
    for other in _ONLY:
        for field in _ONLY[other] if other != name else ():
            if field in table.data:
                raise SlicewiseError(f"{path}: {field}: is for the {other} experiment only")
    title = table.take("title", text, "")
    spans: dict[str, tuple[Any, ...]] = {
        "model": table.take("model", _some(text), ("A100-80GB",)),
        "gpus": table.take("gpus", _some(integer), (100,)),
        "loads": table.take("loads", _some(_fraction), (0.85,)),
        "seeds": table.take("seeds", _some(_seed), (1,)),
        "distributions": table.take("distributions", _some(text), ("uniform",)),
        "policies": table.take("policies", _some(text)),
    }
    settings: dict[str, Any] = {
        "runs": table.take("runs", integer, 20),
        "gpus_per_node": table.take("gpus_per_node", integer, 8),
    }
    steady: dict[str, Any] = {
        "lifetimes": table.take("duration", integer, 40),
        "warmup": table.take("warmup", integer, 3),
        "oracle": table.take("oracle", _yes_or_no, True),
    }
    rules = tuple(map(str, Lifetime))
    lifetime = table.take("lifetime", _one_of("lifetime rule", rules), rules[0])
    table.finish()
    _check_size(path, prod(map(len, spans.values())), settings["runs"])
    if name == "steady":
        settings |= steady
    else:
        settings["lifetime"] = Lifetime(lifetime)
        spans["loads"] = (None,)
    with _named(path):
        experiments = tuple(_points(path, spans, settings))
    return Sweep(path.name, title, raw, name, experiments)


def _points(
    path: Path, spans: dict[str, tuple[Any, ...]], settings: dict[str, Any]
) -> Iterator[Experiment]:
    policies = tuple(policy(name) for name in spans["policies"])
    check_different(policies)
    seen: set[str] = set()
    for model in spans["model"]:
        geometry = load_geometry(_beside(path, model))
        if geometry.model in seen:  # by another of its names, or by a file
            raise SlicewiseError(f"model {geometry.model!r} is named twice")
        seen.add(geometry.model)
        mixes = tuple(parse_mix(name, geometry) for name in spans["distributions"])
        for gpus, load, seed in product(spans["gpus"], spans["loads"], spans["seeds"]):
            if load is None:
                yield Published(mixes, policies, gpus, seed=seed, **settings)
            else:
                steady = Steady(mixes, policies, gpus, seed=seed, load=load, **settings)
                for mix in range(len(mixes)):
                    steady.units(mix)  # refuses a load that is too low
                yield steady


def _beside(path: Path, model: str) -> str:
    """The model's name, or its file, which is looked for from the experiment file's folder."""
    is_file = re.search(r"[/\\]|\.toml$", model.casefold())
    return str(path.parent / model) if is_file else model


def _check_size(path: Path, cells: int, runs: int) -> None:
    for count, limit, what in (
        (cells, MAX_CELLS, "combinations"),
        (cells * runs, MAX_RUNS, "runs"),
    ):
        if count > limit:
            raise SlicewiseError(
                f"{path}: spans {count:,} {what}, more than {limit:,}; split it into several files"
            )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put the file in front of what is wrong with its values."""
    try:
        yield
    except SlicewiseError as error:
        raise SlicewiseError(f"{path}: {error}") from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:  # A path with a NUL in it.
        raise SlicewiseError(f"{str(path)!r} is not a path") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise SlicewiseError(f"{path}: larger than {_MAX_FILE_BYTES:,} bytes, so no experiment")
    try:
        return raw.decode("utf-8-sig")  # Some editors put a mark in front.
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SlicewiseError(f"{path}: line {line} is not UTF-8 text") from None


def _parse(raw: str, path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(raw)
    except RecursionError:
        raise SlicewiseError(f"{path}: not TOML slicewise can read: nested too deeply") from None
    except ValueError as error:  # Mostly TOMLDecodeError, which names the line.
        raise SlicewiseError(f"{path}: not TOML: {error}") from None


def _some(read: Reader[T]) -> Reader[tuple[T, ...]]:
    """A reader of one value or an array of different ones."""

    def read_some(value: object, path: str) -> tuple[T, ...]:
        found = list_of(read)(value, path) if isinstance(value, list) else (read(value, path),)
        if not found:
            raise GeometryError(path, "is empty")
        seen: set[T] = set()
        for item in found:
            if item in seen:
                raise GeometryError(path, f"{item!r} is named twice")
            seen.add(item)
        return found

    return read_some


def _one_of(what: str, known: tuple[str, ...]) -> Reader[str]:
    """A reader of one of a few names."""

    def read_name(value: object, path: str) -> str:
        name = text(value, path)
        if name not in known:
            raise GeometryError(path, str(UnknownNameError(what, name, known)))
        return name

    return read_name


def _fraction(value: object, path: str) -> float:
    return float(amount(value, path))


def _seed(value: object, path: str) -> int:
    """A whole number, which may be larger than any other in the file."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise GeometryError(path, f"needs a whole number, not {kind(value)}")
    if not 0 <= value < 1 << 64:
        raise GeometryError(path, "is not in 0..2^64-1")
    return value


def _yes_or_no(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise GeometryError(path, f"needs true or false, not {kind(value)}")
    return value
