"""The commit loop: decides commands in batches, makes each batch durable, then answers it.

One task on the event loop runs `CommitLoop._commit_batches`, which lists the steps of a batch. Only
calls of the store run in a thread. Commands that arrive during a commit share the next one (group
commit).

The deciding state is ahead of the journal during a commit, so only this loop reads it. The replica,
which serves reads, receives rows when they are durable.

The outcome of a failed commit is unknown. The loop then discards its state and reads the journal
again before it decides anything else: recovery is the same as a start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from slicewise.config.logs import logger
from slicewise.control.actors import Actor
from slicewise.control.answers import Answer, RefusedError
from slicewise.control.commands import Command, work_of
from slicewise.control.handler import CommandHandler
from slicewise.control.ports import (
    DAMAGED,
    Clock,
    FencedError,
    IdempotencyKey,
    Journal,
    Kept,
    StoreError,
    rows_after,
)
from slicewise.control.snapshot import Snapshot, restore_snapshot, snapshot_of
from slicewise.control.state import State
from slicewise.journal.entries import Row, Seconds
from slicewise.runtime.fair_queue import FairQueue

T = TypeVar("T")

log = logger()

MAX_BATCH = 64
"""The largest batch, counted in single-instance commands. Every request in a batch waits for the
whole batch, and the event loop is blocked while the batch is decided."""
ROWS_BETWEEN_SNAPSHOTS = 100_000
RETRY_SECONDS = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Pauses after consecutive failures of the store; the last one repeats."""
MAX_SLEEP_SECONDS = 60.0
"""The longest sleep: timers do not advance while a machine is suspended."""

_KEPT = frozenset({200, 201, 202, 409})
"""Statuses of answers that are stored for an idempotency key. After any other status, the client
may correct the request and retry it with the same key."""

UNKNOWN_OUTCOME = (
    "the database failed during the commit, so the outcome of this request is unknown; "
    "repeat it with the same Idempotency-Key to learn the outcome"
)
NO_DATABASE = "the database cannot be reached; nothing was changed, try again"
NOT_LEADING = "this process is no longer the leader; nothing was changed"
STOPPING = "the service is stopping; nothing was changed"


class Submission(msgspec.Struct):
    """A command submitted to the commit loop."""

    command: Command
    actor: Actor
    key: IdempotencyKey | None = None
    """The idempotency key, if the client sent one."""
    digest: str = ""
    """Digest of the request, to detect a key that is reused for another request."""
    arrived: float = 0
    """When the runtime submitted the command; used for its timeout only."""
    future: asyncio.Future[Outcome] | None = None
    """Resolved by the runtime with the outcome, then dropped."""
    share: Hashable = None
    """The tenant or token that the queue serves in turn with others."""


class Outcome(msgspec.Struct, frozen=True):
    """A submission and its answer; ``replayed`` if the answer was stored for its key."""

    submission: Submission
    answer: Answer
    replayed: bool = False


@dataclass(slots=True)
class Batch:
    """Decided submissions: the rows to append and the outcomes to answer with."""

    rows: list[Row] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    decide_seconds: float = 0
    commit_seconds: float = 0


Deliver = Callable[[Batch], None]


class CommitLoop:
    """Decides and commits batch after batch while this process leads.

    Call all methods on the event loop; the attributes may be read from any thread.
    """

    def __init__(
        self,
        journal: Journal,
        fresh_state: Callable[[], State],
        epoch: int,
        clock: Clock,
        new_handler: Callable[[State], CommandHandler],
        deliver: Deliver,
        timer: Callable[[], float],
        delivered: int = 0,
        max_batch: int = MAX_BATCH,
        rows_between_snapshots: int = ROWS_BETWEEN_SNAPSHOTS,
        warn: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """``deliver`` receives durable batches and refusals.

        ``delivered`` is the last row that its receiver already has. ``warn`` receives problems
        that do not stop the loop.
        """
        self._journal = journal
        self._fresh_state = fresh_state
        self._epoch = epoch
        self._clock = clock
        self._new_handler = new_handler
        self._deliver = deliver
        self._timer = timer
        self._delivered = delivered
        self._max_batch = max_batch
        self._rows_between_snapshots = rows_between_snapshots
        self._warn = warn
        self._queue: FairQueue[Submission] = FairQueue()
        self._wake = asyncio.Event()
        """Set by a submission, by a deadline, and by ``stop``."""
        self._stop = asyncio.Event()
        self._store_thread = ThreadPoolExecutor(1, "commit")
        self._task: asyncio.Task[None] | None = None
        self._snapshot_seq = 0
        self._failures = 0
        """Consecutive failures of the store."""
        self.fenced = False
        """Whether another process has become the leader; the loop has ended."""
        self.trouble: str | None = None
        """Why the store cannot be written at the moment; None if it can."""

    def start(self) -> None:
        """Start the loop."""
        self._task = asyncio.create_task(self._run())

    def submit(self, submission: Submission) -> None:
        """Queue a command; ``deliver`` receives its outcome."""
        if self._stop.is_set():
            self._refuse([submission], self._ended())
        else:
            self._queue.append(submission.share, submission)
            self._wake.set()

    async def stop(self) -> None:
        """Commit what is queued, keep a snapshot, and end."""
        self._stop.set()
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def alive(self) -> bool:
        """Whether the loop runs or has not been started."""
        return self._task is None or not self._task.done()

    @property
    def waiting(self) -> int:
        """The number of queued submissions."""
        return len(self._queue)

    async def _run(self) -> None:
        """Load the state and commit batches; after any failure of the store, do both again."""
        try:
            while True:
                try:
                    return await self._commit_batches(await self._load())
                except StoreError as error:
                    self.trouble = str(error)
                await self._pause()
                if self._stop.is_set() and not self._queue:
                    return
        except FencedError:
            self.fenced = True
        except Exception:
            log.exception("commit loop failed")  # the leader elector sees that it is not alive
        finally:
            self._stop.set()
            self._refuse_queued(self._ended())
            self._store_thread.shutdown(wait=False)

    async def _commit_batches(self, handler: CommandHandler) -> None:
        """Commit batch after batch until the loop is stopped."""
        while True:
            # 1. Wait for a submission, a deadline or a stop, and take a batch from the queue.
            steady = await self._wait_for_work(handler)
            submissions = self._next_batch()
            if not submissions and self._stop.is_set():
                await self._save_snapshot(handler.state)
                return
            try:
                # 2. Read the stored answers of idempotency keys.
                keys = [one.key for one in submissions if one.key is not None]
                kept = await self._in_store_thread(self._journal.answers, keys) if keys else {}
                # 3. Decide. The rows exist only in the handler's state so far.
                batch, fresh = self._decide(handler, submissions, steady, kept)
                # 4. Append rows and answers in one transaction, in the store's thread.
                await self._append(batch, fresh, steady + handler.state.clock_offset)
            except FencedError:
                self._refuse(submissions, NOT_LEADING)
                raise
            except Exception:
                self._refuse(submissions, UNKNOWN_OUTCOME)
                raise
            # 5. Deliver: the runtime applies the rows to the replica and answers the requests.
            self._delivered += len(batch.rows)
            self._deliver(batch)
            # 6. Shorten the next start.
            if handler.state.seq - self._snapshot_seq >= self._rows_between_snapshots:
                await self._save_snapshot(handler.state)

    async def _in_store_thread(self, function: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._store_thread, function, *args)

    async def _pause(self) -> None:
        """Wait after a failure, longer after consecutive ones; a stop ends the wait."""
        pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), pause)

    async def _load(self) -> CommandHandler:
        """Build a handler from the journal, and deliver the rows that the receiver lacks."""
        try:
            state, snapshot_seq, rows = await self._in_store_thread(self._read)
        except StoreError:
            self._refuse_queued(NO_DATABASE)
            raise
        self.trouble = None
        self._snapshot_seq = snapshot_seq
        if rows:  # of former leaders, or of a commit that succeeded although it reported a failure
            self._delivered = rows[-1].seq
            self._deliver(Batch(rows=rows))
        return self._new_handler(state)

    def _read(self) -> tuple[State, int, list[Row]]:
        """Return the state, the row of its snapshot, and the rows not delivered yet."""
        snapshot = self._journal.last_snapshot()
        state = load(self._journal, self._fresh_state(), snapshot)
        rows = list(rows_after(self._journal, self._delivered))
        return state, 0 if snapshot is None else snapshot.seq, rows

    async def _wait_for_work(self, handler: CommandHandler) -> Seconds:
        """Sleep until a submission arrives, a lease or deadline is due, or the loop is stopped.

        Returns the steady time.
        """
        while True:
            steady = self._clock()
            now = steady + handler.state.clock_offset
            due = handler.next_time
            if self._queue or self._stop.is_set() or (due is not None and due <= now):
                return steady
            self._wake.clear()
            pause = MAX_SLEEP_SECONDS if due is None else min(MAX_SLEEP_SECONDS, due - now + 0.001)
            timer = asyncio.get_running_loop().call_later(pause, self._wake.set)
            await self._wake.wait()
            timer.cancel()

    def _next_batch(self) -> list[Submission]:
        submissions = []
        room = self._max_batch
        while self._queue and room > 0:
            submission = self._queue.popleft()
            submissions.append(submission)
            room -= work_of(submission.command)
        return submissions

    def _decide(
        self,
        handler: CommandHandler,
        submissions: list[Submission],
        steady: Seconds,
        kept: dict[IdempotencyKey, Kept],
    ) -> tuple[Batch, dict[IdempotencyKey, Kept]]:
        """Decide submissions in order; return the batch, and the answers to store for new keys."""
        begun = self._timer()
        batch = Batch()
        fresh: dict[IdempotencyKey, Kept] = {}
        handler.expire(steady)
        for submission in submissions:
            key = submission.key
            known = None if key is None else kept.get(key)
            if known is None:
                answer = handler.decide(submission.command, submission.actor, steady)
                if key is not None and answer.status in _KEPT:
                    kept[key] = fresh[key] = Kept(submission.digest, answer)
                batch.outcomes.append(Outcome(submission, answer))
            else:
                batch.outcomes.append(_stored_outcome(handler, submission, known))
        handler.serve_queue(steady)
        batch.rows = handler.take_rows()
        batch.decide_seconds = self._timer() - begun
        return batch, fresh

    async def _append(self, batch: Batch, fresh: dict[IdempotencyKey, Kept], now: Seconds) -> None:
        begun = self._timer()
        if batch.rows or fresh:
            answers = [(key, kept, now) for key, kept in fresh.items()]
            await self._in_store_thread(self._journal.append, self._epoch, batch.rows, answers)
            self._failures = 0
        else:
            await asyncio.sleep(0)  # between batches, the event loop serves others
        batch.commit_seconds = self._timer() - begun

    async def _save_snapshot(self, state: State) -> None:
        """Save a snapshot so that the next start reads fewer rows; a failure loses nothing."""
        if state.seq > self._snapshot_seq:
            self._snapshot_seq = state.seq  # after a failure, wait for as many rows again
            try:
                await self._in_store_thread(lambda: self._journal.save_snapshot(snapshot_of(state)))
            except StoreError as error:
                self._warn(f"no snapshot of the state could be kept: {error}")

    def _ended(self) -> str:
        """Why no further command is decided."""
        return NOT_LEADING if self.fenced else STOPPING

    def _refuse_queued(self, why: str) -> None:
        self._refuse([self._queue.popleft() for _ in range(len(self._queue))], why)

    def _refuse(self, submissions: list[Submission], why: str) -> None:
        if submissions:
            answer = RefusedError(503, why).answer()
            self._deliver(Batch(outcomes=[Outcome(one, answer) for one in submissions]))


def load(journal: Journal, state: State, snapshot: Snapshot | None = None) -> State:
    """Bring a fresh state to the end of the journal, from its last snapshot or the one given."""
    snapshot = snapshot or journal.last_snapshot()
    if snapshot is not None:
        restore_snapshot(snapshot, state)
    for row in rows_after(journal, state.seq):
        state.apply(row)
    return state


def _stored_outcome(handler: CommandHandler, submission: Submission, known: Kept) -> Outcome:
    """The answer stored for a key, if the caller's token is still valid."""
    try:
        handler.check(submission.actor)
    except RefusedError as refusal:
        return Outcome(submission, refusal.answer())
    if known is DAMAGED:
        return Outcome(submission, _ANSWER_DAMAGED)
    if known.digest != submission.digest:
        return Outcome(submission, _KEY_REUSED)
    return Outcome(submission, known.answer, replayed=True)


_ANSWER_DAMAGED = RefusedError(
    500,
    "the answer stored for this Idempotency-Key is damaged, so the outcome is unknown; "
    "check the allocations before you retry with a new key",
).answer()
_KEY_REUSED = RefusedError(
    422, "this Idempotency-Key was used for another request; use a new key for a new request"
).answer()
