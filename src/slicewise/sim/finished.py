"""What is finished, on disk: every job is written down as it ends, and never changed.

Each session appends to a file of its own, a line a job, with a checksum. Whatever moment a
session is killed at, all lines but the one being written are whole; that one is noticed by its
checksum, and its runs are run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from zlib import crc32

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.sim.crew import Done, Samples
from slicewise.sim.experiment import Experiment
from slicewise.sim.meaning import digest, meaning
from slicewise.sim.runner import Outcome
from slicewise.sim.workload import Ints

Record = dict[str, Any]


def load_finished(folder: Path, outcomes: Sequence[Outcome]) -> int:
    """Fill in the runs that earlier sessions finished; returns how many lines were damaged.

    Only runs that mean the same (`meaning.digest`) and are still asked for are taken.
    """
    wanted: dict[str, list[tuple[Outcome, Samples]]] = {}
    for outcome in outcomes:
        for mix, entrant in outcome.cells():
            samples = outcome.samples.setdefault((mix, entrant), {})
            key = digest(outcome.experiment, mix, entrant)
            wanted.setdefault(key, []).append((outcome, samples))
    damaged = 0
    for path in _segments(folder):
        for record in _records(path):
            if record is None:
                damaged += 1
                continue
            for outcome, samples in wanted.get(record.get("of", ""), ()):
                for run, numbers in zip(record["runs"], record["samples"], strict=True):
                    if run < outcome.experiment.runs:
                        _take(samples, run, np.array(numbers, np.int64), path)
    return damaged


def _take(samples: Samples, run: int, numbers: Ints, path: Path) -> None:
    if run in samples and not np.array_equal(samples[run], numbers):
        raise SlicewiseError(
            f"{path}: run {run} has another result than an earlier session found, although "
            "nothing it depends on has changed; use another folder, and please report it"
        )
    samples[run] = numbers


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def _records(path: Path) -> Iterator[Record | None]:
    """The lines of one session; None for a damaged one. A last line cut short is no damage."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                if line.endswith("\n"):
                    yield _checked(line)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None


def _checked(line: str) -> Record | None:
    text = line[_BEFORE:-_AFTER]
    if line != _framed(text):
        return None
    record: Record = json.loads(text)
    return record


def _framed(text: str) -> str:
    """A line: a JSON array of the checksum and the record."""
    return f'["{crc32(text.encode("utf-8", "replace")):08x}",{text}]\n'


_BEFORE, _AFTER = len('["01234567",'), len("]\n")
"""What stands before and after the record in a line."""


class FinishedLog:
    """The file of one session; made when the first job is finished."""

    def __init__(self, folder: Path, experiments: Sequence[Experiment]) -> None:
        self._folder = folder
        self._experiments = experiments
        self._file: IO[str] | None = None
        self._described: set[str] = set()

    def keep(self, done: Done) -> None:
        """Write a finished job down."""
        job = done.job
        cell = (self._experiments[job.experiment], job.mix, job.entrant)
        key = digest(*cell)
        try:
            if self._file is None:
                self._file = _new_segment(self._folder)
            if key not in self._described:
                self._described.add(key)
                self._write(self._file, {"cell": key, "means": meaning(*cell)})
            samples = [done.samples[run].tolist() for run in job.runs]
            record = {"of": key, "runs": job.runs, "samples": samples, "by": done.by}
            self._write(self._file, record)
            # Not forced to the disk: what a power failure takes along is only run again.
            self._file.flush()
        except OSError as error:
            why = error.strerror or str(error)
            raise SlicewiseError(f"{str(self._folder)!r} cannot be written: {why}") from None

    def _write(self, file: IO[str], record: Record) -> None:
        file.write(_framed(json.dumps(record, separators=(",", ":"))))

    def __enter__(self) -> FinishedLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with suppress(OSError):  # `keep` has said what could not be written
                self._file.close()


def _new_segment(folder: Path) -> IO[str]:
    """A file nobody else writes to, after all that are there."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(_segments(folder)) + 1
    while True:
        try:
            return (folder / f"{number:06d}.jsonl").open("x", encoding="utf-8", newline="\n")
        except FileExistsError:
            number += 1
