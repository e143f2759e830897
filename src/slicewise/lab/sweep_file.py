"""Sweeps: an experiment file (TOML), its points, and the rows of all points together.

A point is a combination of model, size, load and seed, and is one experiment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from slicewise.catalog import load_geometry
from slicewise.catalog.fields import (
    Reader,
    Table,
    amount,
    integer,
    kind,
    list_of,
    parse_toml,
    read_file,
    text,
)
from slicewise.core.errors import GeometryError, SlicewiseError, UnknownNameError
from slicewise.lab.experiment import Experiment, Published, Steady
from slicewise.lab.mix import parse_mix
from slicewise.lab.results import Row, published_rows, steady_rows
from slicewise.lab.runner import Outcome
from slicewise.lab.workload import Lifetime
from slicewise.policies.registry import check_different, policy

T = TypeVar("T")

MAX_CELLS = 100_000
"""Maximum of points times distributions times policies; a larger sweep is probably a mistake."""
MAX_RUNS = 2_000_000
"""Maximum number of runs: all results are held in memory, about a kilobyte each."""

_ONLY = {
    "steady": ("loads", "duration", "warmup", "oracle"),
    "published": ("lifetime",),
}
"""By experiment: the fields that the other one does not have."""


@dataclass(frozen=True)
class Sweep:
    """The points of an experiment file."""

    name: str
    """The name of the file."""
    title: str
    """The title in the file; may be empty."""
    text: str
    """The content of the file."""
    kind: str
    """Steady or published."""
    experiments: tuple[Experiment, ...]
    """By model, then size, then load, then seed, each in the order of the file."""

    def outcomes(self) -> list[Outcome]:
        """Return an empty outcome per point."""
        return [Outcome(experiment) for experiment in self.experiments]


def total_runs(outcomes: Sequence[Outcome]) -> int:
    """Return the number of runs, finished or not."""
    return sum(len(outcome.cells()) * outcome.experiment.runs for outcome in outcomes)


def point(experiment: Experiment) -> Row:
    """Return the columns that identify a point."""
    columns: Row = {"model": experiment.mixes[0].geometry.model, "gpus": experiment.gpus}
    if isinstance(experiment, Steady):
        columns["load"] = experiment.load
    return {**columns, "seed": experiment.seed}


def summary_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the rows of `simulate` for each point, with the columns of the point first.

    A distribution without a run that all policies finished has no rows.
    """
    rows: list[Row] = []
    for outcome in outcomes:
        experiment = outcome.experiment
        paired = {mix.name: len(outcome.paired_runs(m)) for m, mix in enumerate(experiment.mixes)}
        if not any(paired.values()):
            continue
        point_rows = (
            steady_rows(outcome) if isinstance(experiment, Steady) else published_rows(outcome)
        )
        for row in point_rows:
            names = {"distribution": row["distribution"], "policy": row["policy"]}
            runs = {"runs": paired[str(row["distribution"])]}
            rows.append({**point(experiment), **names, **runs, **row})
    return rows


def load_sweep(path: str | Path) -> Sweep:
    """Read an experiment file; every error is one line that names the file."""
    path = Path(path)
    content, data = parse_toml(read_file(path), str(path), "an experiment")
    table = Table(data, f"{path}: ")
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
    with _errors_name(path):
        experiments = tuple(_points(path, spans, settings))
    return Sweep(path.name, title, content, name, experiments)


def _points(
    path: Path, spans: dict[str, tuple[Any, ...]], settings: dict[str, Any]
) -> Iterator[Experiment]:
    policies = tuple(policy(name) for name in spans["policies"])
    check_different(policies)
    seen: set[str] = set()
    for model in spans["model"]:
        geometry = load_geometry(_beside(path, model))
        if geometry.model in seen:  # under an alias, or from a file
            raise SlicewiseError(f"model {geometry.model!r} is named twice")
        seen.add(geometry.model)
        mixes = tuple(parse_mix(name, geometry) for name in spans["distributions"])
        for gpus, load, seed in product(spans["gpus"], spans["loads"], spans["seeds"]):
            if load is None:
                yield Published(mixes, policies, gpus, seed=seed, **settings)
            else:
                steady = Steady(mixes, policies, gpus, seed=seed, load=load, **settings)
                for mix in range(len(mixes)):
                    steady.units(mix)  # raises if the load is too low
                yield steady


def _beside(path: Path, model: str) -> str:
    """Return the model's name, or its file relative to the folder of the experiment file."""
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
def _errors_name(path: Path) -> Iterator[None]:
    """Prefix errors with the file."""
    try:
        yield
    except SlicewiseError as error:
        raise SlicewiseError(f"{path}: {error}") from None


def _some(read: Reader[T]) -> Reader[tuple[T, ...]]:
    """Return a reader of one value or an array of different values."""

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
    """Return a reader of one of the known names."""

    def read_name(value: object, path: str) -> str:
        name = text(value, path)
        if name not in known:
            raise GeometryError(path, str(UnknownNameError(what, name, known)))
        return name

    return read_name


def _fraction(value: object, path: str) -> float:
    return float(amount(value, path))


def _seed(value: object, path: str) -> int:
    """Read a seed, which may have 64 bits, more than other numbers."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise GeometryError(path, f"needs a whole number, not {kind(value)}")
    if not 0 <= value < 1 << 64:
        raise GeometryError(path, "is not in 0..2^64-1")
    return value


def _yes_or_no(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise GeometryError(path, f"needs true or false, not {kind(value)}")
    return value
