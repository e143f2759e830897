"""Requests per second of the commit loop with SQLite, without HTTP, for bench_service.py."""

from __future__ import annotations

import asyncio
import cProfile
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slicewise.catalog import Catalog
from slicewise.control.actors import internal
from slicewise.control.answers import Answer
from slicewise.control.commands import AddNode, Create, Release, SetTenant, Terms
from slicewise.control.geometries import record_of
from slicewise.control.handler import CommandHandler
from slicewise.control.ports import IdempotencyKey, Kept
from slicewise.control.state import State
from slicewise.journal.entries import QuotaRecord, Want
from slicewise.runtime.commit_loop import Batch, CommitLoop, Submission
from slicewise.store import open_store

T = TypeVar("T")

MODEL = "A100-80GB"
PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "1g.10gb", "4g.40gb")
NODE_GPUS = 8
WARM_UP_SECONDS = 0.3


def measure_writer(
    folder: Path, max_batch: int, clients: int, seconds: float, kind: type[CommitLoop] = CommitLoop
) -> float:
    """Measure the requests per second of the commit loop with SQLite."""
    return asyncio.run(_measure(folder, max_batch, clients, seconds, kind))


async def _measure(
    folder: Path, max_batch: int, clients: int, seconds: float, kind: type[CommitLoop]
) -> float:
    folder.mkdir()
    store = open_store(folder)
    epoch = store.lead("bench", "", 3600)
    assert epoch is not None
    answers = _Answers(clients, max_batch)
    writer = kind(
        store,
        lambda: State("default"),
        epoch,
        time.time,
        lambda state: CommandHandler(state, answers.new_id),
        answers.take,
        time.perf_counter,
        max_batch=max_batch,
    )
    answers.writer = writer
    writer.start()
    geometry = record_of(Catalog.builtin().find(MODEL).require())
    for number in range(40):
        writer.submit(Submission(AddNode(f"node-{number}", geometry, NODE_GPUS), internal("bench")))
    await answers.begin(seconds)
    await writer.stop()
    store.close()
    return answers.count / seconds


class _Answers:
    """Clients of a commit loop; each submits its next command when the last is answered."""

    def __init__(self, clients: int, run: int) -> None:
        self.writer: CommitLoop | None = None
        self.count = 0
        self._clients = clients
        self._run = run
        self._keys, self._ids = itertools.count(), itertools.count()
        self._over = asyncio.Event()
        self._counts = self._stops = float("inf")

    async def begin(self, seconds: float) -> None:
        """Start all clients and wait until the time is over."""
        assert self.writer is not None
        self.writer.submit(
            Submission(SetTenant("acme", QuotaRecord(), new=True), internal("bench"))
        )
        self._counts = time.perf_counter() + WARM_UP_SECONDS
        self._stops = self._counts + seconds
        for _ in range(self._clients):
            self._submit(None)
        await self._over.wait()

    def new_id(self, letter: str) -> str:
        """Return an id of the same length as those of the service."""
        return f"{letter}{next(self._ids):020}"

    def take(self, batch: Batch) -> None:
        """Handle a durable batch; called by the commit loop."""
        now = time.perf_counter()
        for outcome in batch.outcomes:
            if isinstance(outcome.submission.command, Create | Release):
                self.count += self._counts <= now <= self._stops
                if now <= self._stops:
                    self._submit(outcome.answer)
                else:
                    self._over.set()

    def _submit(self, answer: Answer | None) -> None:
        assert self.writer is not None
        if answer is not None and answer.status == 201:
            self.writer.submit(Submission(Release(answer.body[7:28].decode()), internal("bench")))
            return
        number = next(self._keys)
        terms = Terms(Want(PROFILES[number % len(PROFILES)]))
        key = IdempotencyKey("acme", f"{self._run}-{number}")
        self.writer.submit(Submission(Create("acme", terms), internal("bench"), key, "digest"))


class ProfiledWriter(CommitLoop):
    """A commit loop that profiles its decisions and its calls of the store."""

    profile = cProfile.Profile()

    def _decide(self, *args: Any) -> tuple[Batch, dict[IdempotencyKey, Kept]]:
        return self.profile.runcall(super()._decide, *args)

    async def _in_store_thread(self, function: Callable[..., T], *args: object) -> T:
        return await super()._in_store_thread(partial(self.profile.runcall, function), *args)
