"""The writer alone, for bench_service.py: how many requests it takes to SQLite without any HTTP."""

from __future__ import annotations

import cProfile
import itertools
import threading
import time
from pathlib import Path

from slicewise.catalog import Catalog
from slicewise.control.actors import internal
from slicewise.control.answers import Answer
from slicewise.control.commands import AddNode, Create, Release, SetTenant, Terms
from slicewise.control.desk import Desk
from slicewise.control.entries import QuotaRecord, Want
from slicewise.control.geometries import record_of
from slicewise.control.ports import Key
from slicewise.control.state import State
from slicewise.control.writer import Batch, Job, Writer
from slicewise.engine.queue import Discipline
from slicewise.store import open_store

MODEL = "A100-80GB"
PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "1g.10gb", "4g.40gb")
NODE_GPUS = 8
WARM_UP_SECONDS = 0.3


def measure_writer(
    folder: Path, max_batch: int, clients: int, seconds: float, kind: type[Writer] = Writer
) -> float:
    """Requests a second through the writer and SQLite alone."""
    folder.mkdir()
    store = open_store(folder)
    epoch = store.lead("bench", "", 3600)
    assert epoch is not None
    answers = _Answers(clients, max_batch)
    writer = kind(
        store,
        lambda: State("default", Discipline()),
        epoch,
        time.time,
        answers.new_id,
        answers.take,
        time.perf_counter,
        max_batch=max_batch,
    )
    answers.writer = writer
    writer.start()
    geometry = record_of(Catalog.builtin().find(MODEL).require())
    for number in range(40):
        writer.submit(Job(AddNode(f"node-{number}", geometry, NODE_GPUS), internal("bench")))
    answers.begin(seconds)
    writer.stop()
    store.close()
    return answers.count / seconds


class _Answers:
    """Clients of a writer: each hands in its next command when it has been told of the last."""

    def __init__(self, clients: int, run: int) -> None:
        self.writer: Writer | None = None
        self.count = 0
        self._clients = clients
        self._run = run
        self._keys, self._ids = itertools.count(), itertools.count()
        self._over = threading.Event()
        self._counts = self._stops = float("inf")

    def begin(self, seconds: float) -> None:
        """Let all clients begin, and wait until the time is over."""
        assert self.writer is not None
        self.writer.submit(Job(SetTenant("acme", QuotaRecord(), new=True), internal("bench")))
        self._counts = time.perf_counter() + WARM_UP_SECONDS
        self._stops = self._counts + seconds
        for _ in range(self._clients):
            self._submit(None)
        self._over.wait()

    def new_id(self, letter: str) -> str:
        """An id as long as those of the service."""
        return f"{letter}{next(self._ids):020}"

    def take(self, batch: Batch) -> None:
        """A batch is durable: called by the writer."""
        now = time.perf_counter()
        for told in batch.told:
            if isinstance(told.job.command, Create | Release):
                self.count += self._counts <= now <= self._stops
                if now <= self._stops:
                    self._submit(told.answer)
                else:
                    self._over.set()

    def _submit(self, answer: Answer | None) -> None:
        assert self.writer is not None
        if answer is not None and answer.status == 201:
            self.writer.submit(Job(Release(answer.body[7:28].decode(), "acme"), internal("bench")))
            return
        number = next(self._keys)
        terms = Terms(Want(PROFILES[number % len(PROFILES)]))
        key = Key("acme", f"{self._run}-{number}")
        self.writer.submit(Job(Create("acme", terms), internal("bench"), key, "digest"))


class ProfiledWriter(Writer):
    """A writer that keeps count of where its time goes, from its first request on."""

    profile = cProfile.Profile()

    def _round(self, desk: Desk, jobs: list[Job], now: float) -> None:
        self.profile.runcall(super()._round, desk, jobs, now)
