"""The writer: decides, makes durable, and only then tells.

Commands that arrive while a commit is under way are decided together afterwards and share the
next commit, so the more there is to do, the less a single decision costs.

When a commit fails, nobody knows whether it took place. The writer then forgets all it knows and
reads the journal again before it decides anything: recovering from a failure is the same as
starting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import msgspec

from slicewise.control import lives
from slicewise.control.actors import Actor
from slicewise.control.answers import Answer, RefusedError
from slicewise.control.commands import Command, work_of
from slicewise.control.desk import QUEUED_PER_TENANT, Desk
from slicewise.control.entries import Row, Seconds
from slicewise.control.fair_queue import FairQueue
from slicewise.control.image import Image, image_of, restore
from slicewise.control.ledger import NewId
from slicewise.control.models import MOST_MODELS, MOST_STATES
from slicewise.control.placing import OnPolicyError
from slicewise.control.ports import (
    DAMAGED,
    Clock,
    FencedError,
    Journal,
    Kept,
    Key,
    StoreError,
    rows_after,
)
from slicewise.control.state import State

MAX_BATCH = 64
"""Work that shares a commit, in commands of one instance each: what arrives during it waits for
all of it, whoever sent it, and the event loop stands still while it is decided."""
ROWS_BETWEEN_IMAGES = 100_000
RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""How long to wait before trying the journal again; the last one goes on."""

_KEPT = frozenset({200, 201, 202, 409})
"""Answers that a retry gets again; a mistake, such as an unknown name, may be corrected."""

UNKNOWN_OUTCOME = (
    "the database failed while this was written, so it may or may not have happened; "
    "ask again with the same Idempotency-Key to find out"
)
NO_DATABASE = "the database cannot be reached; nothing was changed, try again"
NOT_LEADING = "this process does not lead any more; nothing was changed"
STOPPING = "the service is stopping; nothing was changed"


class Job(msgspec.Struct):
    """A command on its way through the writer."""

    command: Command
    actor: Actor
    key: Key | None = None
    """An idempotency key, and the digest of the request it stands for."""
    digest: str = ""
    arrived: float = 0
    """When it was handed in, and whom to tell; the writer looks at neither."""
    tell: object = None
    share: Hashable = None
    """With whom it shares its turns: a batch takes one job of each share after another."""


class Told(msgspec.Struct, frozen=True):
    """A job and its answer; ``replayed`` if the answer was given before."""

    job: Job
    answer: Answer
    replayed: bool = False


@dataclass(slots=True)
class Batch:
    """What one commit brought: rows for those who follow, answers for those who asked."""

    rows: list[Row] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    decide_seconds: float = 0
    commit_seconds: float = 0


Deliver = Callable[[Batch], None]


class Writer:
    """Decides and commits, batch by batch, as long as it leads."""

    def __init__(
        self,
        journal: Journal,
        fresh_state: Callable[[], State],
        epoch: int,
        clock: Clock,
        new_id: NewId,
        deliver: Deliver,
        timer: Callable[[], float],
        delivered: int = 0,  # the last row that whoever gets the batches knows already
        decide_in: Callable[[Callable[[], None]], None] = lambda decide: decide(),
        max_batch: int = MAX_BATCH,
        rows_between_images: int = ROWS_BETWEEN_IMAGES,
        warn: Callable[[str], None] = lambda problem: None,
        queued_per_tenant: int = QUEUED_PER_TENANT,
        on_policy_error: OnPolicyError = lambda error: None,
        most_models: int = MOST_MODELS,
        most_states: int = MOST_STATES,
    ) -> None:
        self._journal = journal
        self._fresh_state = fresh_state
        self._epoch = epoch
        self._clock = clock
        self._new_id = new_id
        self._deliver = deliver
        self._timer = timer
        self._decide_in = decide_in
        """Where decisions are made, one batch at a time: by default in the writer's own thread."""
        self._max_batch = max_batch
        self._rows_between_images = rows_between_images
        self._warn = warn
        """Told, in the writer's thread, what went wrong and keeps nobody from anything."""
        self._queued_per_tenant = queued_per_tenant
        self._on_policy_error = on_policy_error
        self._most_models = most_models
        self._most_states = most_states
        self._jobs: FairQueue[Job] = FairQueue()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._sleeps = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._image_seq = 0
        self._delivered = delivered
        self._finished: Batch | None = None
        """Durable, and not told yet: the next batch is decided first, so that its commit can begin
        while everybody is being told."""
        self.fenced = False
        """Whether somebody else leads; the writer has stopped then."""
        self.trouble: str | None = None
        """What keeps it from writing, while something does."""

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Hand in a job; its answer comes by way of ``deliver``."""
        with self._lock:
            if not self._stopping:
                self._jobs.append(job.share, job)
                if self._sleeps:
                    self._wake.notify()
                return
        why = NOT_LEADING if self.fenced else STOPPING
        self._deliver(Batch(told=[Told(job, _not_available(why))]))

    def stop(self) -> None:
        """Finish what was handed in, keep an image, and end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether it still works, or has not begun."""
        return self._thread.is_alive() or self._thread.ident is None

    @property
    def waiting(self) -> int:
        """Jobs handed in and not begun."""
        return len(self._jobs)

    # The thread

    def _run(self) -> None:
        try:
            desk = self._begin()
            while desk is not None:
                try:
                    jobs, steady = self._next(desk.state)
                    if not jobs and self._stopping:
                        self._keep_image(desk.state)
                        return
                    self._round(desk, jobs, steady)
                    if desk.state.seq - self._image_seq >= self._rows_between_images:
                        self._keep_image(desk.state)
                except StoreError as error:
                    self.trouble = str(error)
                    desk = self._begin()
        except FencedError:
            self.fenced = True
        finally:
            with self._wake:
                self._stopping = True
            self._tell_finished()
            self._turn_away(STOPPING if not self.fenced else NOT_LEADING)

    def _begin(self) -> Desk | None:
        """Read the journal, for as long as it takes; None when it is time to stop."""
        attempt = 0
        while True:
            try:
                image = self._journal.last_image()
                state = load(self._journal, self._fresh_state(), image)
                rows = list(rows_after(self._journal, self._delivered))
            except StoreError as error:
                self.trouble = str(error)
                self._turn_away(NO_DATABASE)
                pause = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                attempt += 1
                with self._wake:
                    if self._stopping or self._wake.wait_for(lambda: self._stopping, pause):
                        return None
            else:
                self.trouble = None
                self._image_seq = 0 if image is None else image.seq
                self._catch_up(rows)
                return Desk(
                    state,
                    self._new_id,
                    self._queued_per_tenant,
                    self._on_policy_error,
                    self._most_models,
                    self._most_states,
                )

    def _next(self, state: State) -> tuple[list[Job], Seconds]:
        """Wait for something to do: jobs, or a moment at which something is over.

        Returns the jobs, and the steady time.
        """
        if not self._jobs:
            self._tell_finished()
        with self._wake:
            while True:
                steady = self._clock()
                now = steady + state.accepted
                due = min(
                    (t for t in (state.next_lease, state.waiting.next_deadline) if t is not None),
                    default=None,
                )
                if self._jobs or self._stopping or (due is not None and due <= now):
                    return self._batch(), steady
                # Time goes on while a machine sleeps, so no wait is longer than a minute.
                self._sleeps = True
                self._wake.wait(60 if due is None else min(60.0, due - now + 0.001))
                self._sleeps = False

    def _batch(self) -> list[Job]:
        """The jobs of the next batch, in turns between shares."""
        jobs = []
        room = self._max_batch
        while self._jobs and room > 0:
            job = self._jobs.popleft()
            jobs.append(job)
            room -= work_of(job.command)
        return jobs

    def _round(self, desk: Desk, jobs: list[Job], steady: Seconds) -> None:
        """Decide, commit, tell."""
        batch = Batch()
        fresh: dict[Key, Kept] = {}
        try:
            keys = [job.key for job in jobs if job.key is not None]
            kept = self._journal.answers(keys) if keys else {}
            self._decide_in(lambda: self._decide(desk, jobs, steady, kept, fresh, batch))
            self._tell_finished()
            decided = self._timer()
            if batch.rows or fresh:
                now = steady + desk.state.accepted
                self._journal.append(
                    self._epoch, batch.rows, [(key, kept, now) for key, kept in fresh.items()]
                )
        except FencedError:
            self._tell_finished()
            self._tell(jobs, NOT_LEADING)
            raise
        except StoreError:
            self._tell_finished()
            self._tell(jobs, UNKNOWN_OUTCOME)
            raise
        batch.commit_seconds = self._timer() - decided
        self._delivered += len(batch.rows)
        self._finished = batch

    def _tell_finished(self) -> None:
        """Deliver what is durable."""
        batch, self._finished = self._finished, None
        if batch is not None:
            self._deliver(batch)

    def _catch_up(self, rows: list[Row]) -> None:
        """Deliver rows whose commit looked like a failure and was none."""
        if rows:
            self._delivered = rows[-1].seq
            self._deliver(Batch(rows=rows))

    def _decide(
        self,
        desk: Desk,
        jobs: list[Job],
        steady: Seconds,
        kept: dict[Key, Kept],
        fresh: dict[Key, Kept],
        batch: Batch,
    ) -> None:
        """Take the jobs in order; ``fresh`` are the answers to be kept beside those that are."""
        begun = self._timer()
        desk.pass_time(steady)
        tell = batch.told.append
        for job in jobs:
            key = job.key
            known = None if key is None else kept.get(key)
            if known is None:
                answer = desk.decide(job.command, job.actor, steady)
                if key is not None and answer.status in _KEPT:
                    kept[key] = fresh[key] = Kept(job.digest, answer)
                tell(Told(job, answer))
            else:
                tell(_replay(desk, job, known))
        desk.serve_queue(steady)
        batch.rows = desk.take_rows()
        batch.decide_seconds = self._timer() - begun

    def _keep_image(self, state: State) -> None:
        """Spare the next start some reading, if that can be; the journal has it all."""
        if state.seq > self._image_seq:
            self._image_seq = state.seq  # one that failed is not tried again at once
            self._tell_finished()  # an image takes a while
            try:
                self._journal.keep_image(image_of(state))
            except StoreError as error:
                self._warn(f"no image of the state could be kept: {error}")

    def _turn_away(self, why: str) -> None:
        with self._wake:
            jobs = [self._jobs.popleft() for _ in range(len(self._jobs))]
        self._tell(jobs, why)

    def _tell(self, jobs: list[Job], why: str) -> None:
        if jobs:
            answer = _not_available(why)
            self._deliver(Batch(told=[Told(job, answer) for job in jobs]))


def load(journal: Journal, state: State, image: Image | None = None) -> State:
    """Bring a fresh state to the end of the journal, by way of its last image or the one given."""
    image = image or journal.last_image()
    if image is not None:
        restore(image, state)
        if image.since is None:
            lives.look_up(journal, state)
    for row in rows_after(journal, state.seq):
        state.apply(row)
    return state


def _replay(desk: Desk, job: Job, known: Kept) -> Told:
    """The answer that was given before, for a caller who may still ask for it."""
    try:
        desk.check(job.actor)
    except RefusedError as refusal:
        return Told(job, refusal.answer())
    if known is DAMAGED:
        return Told(job, _ANSWER_DAMAGED)
    if known.digest != job.digest:
        return Told(job, _KEY_REUSED)
    return Told(job, known.answer, replayed=True)


def _not_available(why: str) -> Answer:
    return RefusedError(503, why).answer()


_ANSWER_DAMAGED = RefusedError(
    500,
    "the answer kept for this Idempotency-Key is damaged, so this may or may not have been done; "
    "look at what there is before you ask again with a new key",
).answer()
_KEY_REUSED = RefusedError(
    422, "this Idempotency-Key was used for another request; use a new key for a new request"
).answer()
