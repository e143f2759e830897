"""The checkpoint of a sweep: an SQLite file with the samples of every finished run.

SQLite keeps the file consistent when a session is killed at any moment, and lets several sessions
write to it at the same time.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np

from slicewise.core.errors import SlicewiseError
from slicewise.lab.executors import Done, Job, Samples
from slicewise.lab.experiment import Experiment
from slicewise.lab.fingerprint import digest, fingerprint
from slicewise.lab.runner import Outcome

FILE_NAME = "checkpoint.sqlite"

_LOCK_TIMEOUT_S = 60.0
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS cells (
        digest TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL
    );
    CREATE TABLE IF NOT EXISTS runs (
        digest TEXT REFERENCES cells,
        run INTEGER,
        samples TEXT NOT NULL,
        worker TEXT NOT NULL,
        PRIMARY KEY (digest, run)
    ) WITHOUT ROWID;
"""


def load_finished(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Fill in the runs that earlier sessions finished.

    A run counts only if its digest is the same and it is still part of the sweep.
    """
    wanted: dict[str, list[tuple[Outcome, Samples]]] = {}
    for outcome in outcomes:
        for mix, entrant in outcome.cells():
            samples = outcome.samples.setdefault((mix, entrant), {})
            key = digest(outcome.experiment, mix, entrant)
            wanted.setdefault(key, []).append((outcome, samples))
    with _readable(path):
        if not path.exists():
            return
        with closing(_connect(path)) as database:
            for key, run, text in database.execute("SELECT digest, run, samples FROM runs"):
                for outcome, samples in wanted.get(key, ()):
                    if run < outcome.experiment.runs:
                        samples[run] = np.array(json.loads(text), np.int64)


class Checkpoint:
    """Appends finished jobs to the file, which is created with the first of them."""

    def __init__(self, path: Path, experiments: Sequence[Experiment]) -> None:
        self._path = path
        self._experiments = experiments
        self._database: sqlite3.Connection | None = None
        self._digests: dict[tuple[int, int, int], str] = {}

    def keep(self, done: Done) -> None:
        """Store a finished job; a result that contradicts a stored one is an error."""
        job = done.job
        with _writable(self._path):
            if self._database is None:
                self._database = _connect(self._path)
            with self._database as database:  # one transaction
                key = self._store_cell(database, job)
                for run in job.runs:
                    samples = json.dumps(done.samples[run].tolist())
                    database.execute(
                        "INSERT OR IGNORE INTO runs VALUES (?, ?, ?, ?)",
                        (key, run, samples, done.worker),
                    )
                    self._check_stored(database, key, run, samples)

    def _store_cell(self, database: sqlite3.Connection, job: Job) -> str:
        """Store the fingerprint of a job's cell, once a session; return its digest."""
        cell = (job.experiment, job.mix, job.entrant)
        if cell not in self._digests:
            experiment = self._experiments[job.experiment]
            self._digests[cell] = digest(experiment, job.mix, job.entrant)
            readable = json.dumps(fingerprint(experiment, job.mix, job.entrant), default=repr)
            database.execute(
                "INSERT OR IGNORE INTO cells VALUES (?, ?)", (self._digests[cell], readable)
            )
        return self._digests[cell]

    def _check_stored(self, database: sqlite3.Connection, key: str, run: int, samples: str) -> None:
        """Raise if another session stored other samples for the same run."""
        (stored,) = database.execute(
            "SELECT samples FROM runs WHERE digest = ? AND run = ?", (key, run)
        ).fetchone()
        if stored != samples:
            raise SlicewiseError(
                f"{self._path}: run {run} has another result than an earlier session found, "
                "although nothing it depends on has changed; use another folder, and please "
                "report it"
            )

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._database is not None:
            self._database.close()


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=_LOCK_TIMEOUT_S)
    try:
        # No sync for each commit: a power failure may lose the last runs, which then run again.
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_SCHEMA)
    except sqlite3.Error:
        database.close()
        raise
    return database


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError, ValueError) as error:
        # Only a damaged file is a plain DatabaseError; a locked one, say, is an OperationalError.
        damaged = type(error) is sqlite3.DatabaseError
        advice = "; delete it to run everything again" if damaged else ""
        raise SlicewiseError(f"{str(path)!r} cannot be read: {error}{advice}") from None


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise SlicewiseError(f"{str(path)!r} cannot be written: {error}") from None
