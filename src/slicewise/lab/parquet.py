"""Writes the results of a sweep as Parquet files: the sums of every run, and the summary.

The same results give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slicewise.core.errors import SlicewiseError
from slicewise.lab.experiment import ORACLE, PUBLISHED_COLUMNS, STEADY_COLUMNS, Steady
from slicewise.lab.results import Row
from slicewise.lab.runner import Outcome
from slicewise.lab.sweep_file import point
from slicewise.lab.workload import BINS

_INTERVAL = "_ci95"
_TEXT = ("model", "distribution", "policy", "compared_with", "oracle_missing")
_WHOLE = ("gpus", "run", "runs")


def runs_table(outcomes: Sequence[Outcome]) -> pa.Table:
    """Return every finished run: a row per run, or per bin of the published experiment."""
    parts = [part for outcome in outcomes for part in _runs_of(outcome)]
    if not parts:
        raise SlicewiseError("there are no results to write")
    return pa.concat_tables(parts).combine_chunks()


def _runs_of(outcome: Outcome) -> Iterator[pa.Table]:
    experiment = outcome.experiment
    names = [policy.name for policy in experiment.policies] + [ORACLE]
    steady = isinstance(experiment, Steady)
    figures = STEADY_COLUMNS if steady else PUBLISHED_COLUMNS
    for mix, entrant in outcome.cells():
        cell = outcome.samples.get((mix, entrant), {})
        runs = sorted(cell)
        if not runs:
            continue
        sums = np.concatenate([np.atleast_2d(cell[run]) for run in runs])
        each = len(sums) // len(runs)
        same = {
            **point(experiment),
            "distribution": experiment.mixes[mix].name,
            "policy": names[entrant],
        }
        columns: dict[str, object] = {name: [value] * len(sums) for name, value in same.items()}
        columns["run"] = np.repeat(np.array(runs, np.int64), each)
        if not steady:
            columns["demand"] = np.tile(np.round(np.arange(BINS) / BINS, 2), len(runs))
        columns |= {name: sums[:, place] for place, name in enumerate(figures)}
        yield pa.table(columns, schema=_schema(columns, (*_WHOLE, *figures)))


def summary_table(rows: Sequence[Row]) -> pa.Table:
    """Return the summary, with the ends of an interval as separate columns."""
    flat = [dict(_flat(row)) for row in rows]
    return pa.Table.from_pylist(flat, schema=_schema(flat[0], _WHOLE))


def _flat(row: Row) -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if name.endswith(_INTERVAL):
            low, high = value if isinstance(value, list) else (None, None)
            yield f"{name}_low", low
            yield f"{name}_high", high
        else:
            yield name, value


def _schema(columns: Iterable[str], whole: Sequence[str]) -> pa.Schema:
    """Return the schema; types follow from names, so that empty columns have a type."""

    def kind(name: str) -> pa.DataType:
        if name in _TEXT:
            return pa.string()
        if name == "seed":
            return pa.uint64()
        return pa.int64() if name in whole else pa.float64()

    return pa.schema([(name, kind(name)) for name in columns])


def write_table(path: Path, table: pa.Table, about: Mapping[str, str]) -> None:
    """Write a table atomically, with ``about`` as the metadata of the file."""
    table = table.replace_schema_metadata(
        {f"slicewise.{name}": text for name, text in about.items()}
    )
    unfinished = path.with_name(f".{path.name}.part")
    try:
        pq.write_table(table, unfinished, compression="zstd")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        why = error.strerror or str(error)
        raise SlicewiseError(f"{str(path)!r} cannot be written: {why}") from None
