"""The runtime of one process: a replica of the journal, and the commit loop while it leads.

A process that does not lead has a follower, a thread that reads committed rows from the store. The
leader elector is another thread; it starts and ends the commit loop. Everything else, the replica
in particular, belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from slicewise.config.logs import logger
from slicewise.config.settings import Settings
from slicewise.control.actors import Actor
from slicewise.control.allocation_index import AllocationIndex
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Command
from slicewise.control.handler import CommandHandler
from slicewise.control.ports import IdempotencyKey, Leader, Store, rows_after
from slicewise.control.state import State
from slicewise.journal.entries import Row, Seconds
from slicewise.runtime.commit_loop import (
    UNKNOWN_OUTCOME,
    Batch,
    CommitLoop,
    Outcome,
    Submission,
    load,
)
from slicewise.runtime.follower import PAGE, Follower
from slicewise.runtime.ids import IdGenerator
from slicewise.runtime.leader_election import LeaderElector
from slicewise.runtime.replica import Replica
from slicewise.runtime.retention import Retention
from slicewise.runtime.source import Source
from slicewise.runtime.steady_clock import SteadyClock

T = TypeVar("T")

log = logger()

ANSWER_SECONDS = 60.0
"""How long a request waits for its commit before it is answered with an unknown outcome."""
_POLICY_ERROR_SECONDS = 1.0
"""Errors of a policy are logged at most this often, because waiting requests are retried often."""


class Runtime:
    """Follows the journal, and accepts commands while this process leads."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        steady: SteadyClock | None = None,
        timer: Callable[[], float] = time.perf_counter,
        source: Source | None = None,
    ) -> None:
        self.store = store
        self.source = source
        self.settings = settings
        # Another system's decisions carry wall-clock times, so they are shown by that clock.
        self.steady = steady or (
            SteadyClock() if source is None else SteadyClock(running=time.time)
        )
        self.timer = timer
        self.address = settings.address
        self.replica = Replica(self._listed_state())
        self.loaded = False
        self.history = ""
        """The identity of the journal; a restored journal has a new one."""
        self.commit_loop: CommitLoop | None = None
        """None unless this process leads."""
        self.epoch = 0
        self.leader: Leader | None = None
        """The other process that leads, if one is known."""
        self.store_trouble: str | None = None
        self.failure: str | None = None
        """Why this process must end; None while it can run."""
        self.on_failure: Callable[[], None] = lambda: None
        self.on_started_leading: Callable[[], None] = lambda: None
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        self.on_followed: Callable[[Sequence[Row]], None] = lambda rows: None
        """Called on the event loop with rows that another process committed."""
        self.furnished = False
        """Whether the first tenant and the admin token exist."""
        self.stopping = False
        self._policy_error_logged = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: deque[Submission] = deque()
        """Submissions that may be unanswered, oldest first."""
        self._followers: list[Follower] = []
        """The last one follows, unless this process leads; the others are ending."""
        holder = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._elector = LeaderElector(
            store,
            self,
            holder,
            lambda: self.address,
            settings.lease_seconds,
            self.steady,
            Retention(
                store,
                settings.answers_hours * 3600,
                settings.journal_days * 86400,
                settings.journal_archive,
                self.clock,
                self.steady,
                lambda problem: log.error("retention failed", problem=problem),
            ),
        )

    @property
    def state(self) -> State:
        """The committed state."""
        return self.replica.state

    # Time

    def clock(self) -> Seconds:
        """Service time: it never jumps, except when an operator accepts a step of the clock."""
        return self.steady() + self.state.clock_offset

    def latest(self) -> Seconds:
        """The later of service time and wall-clock time; tokens expire by it.

        A held step of the wall clock therefore extends no token.
        """
        return max(self.clock(), self.steady.wall())

    def check_clock(self) -> None:
        """Compare the wall clock with service time."""
        self.steady.compare(self.state.clock_offset)

    def _fresh_state(self) -> State:
        settings = self.settings
        return State(
            settings.policy,
            lease_warning=settings.lease_warning_seconds,
            preemptible_price=settings.preemptible_price,
        )

    def _listed_state(self) -> State:
        """A state for reads, with an index to list allocations by."""
        return State(
            self.settings.policy,
            AllocationIndex(),
            preemptible_price=self.settings.preemptible_price,
        )

    # Start and stop

    async def start(self) -> None:
        """Read the journal, follow it and try to lead; returns after the first election."""
        self._loop = asyncio.get_running_loop()
        state = await self.in_thread(load, self.store, self._listed_state())
        reached = await self.in_thread(self.store.reached)
        if self.source is None:
            # The last entry may be later than the time stored with the lease.
            reached = max(reached, state.at - state.clock_offset)
            most = self.settings.clock_max_gap_hours * 3600
            self.steady.begin(reached, state.clock_offset, most)
        self.history = (await self.in_thread(self.store.span)).history
        self.replica.state = state
        self.loaded = True
        self._follow()
        self._elector.start()
        await self.in_thread(self._elector.first_try.wait)

    async def stop(self) -> None:
        """Commit what was submitted, resign, and end all threads."""
        self.stopping = True
        self.replica.notify()
        await self.in_thread(self._elector.stop)
        for follower in self._followers:
            follower.stop()
            await self.in_thread(follower.join)

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run a blocking call in a thread."""
        return await asyncio.get_running_loop().run_in_executor(None, function, *args)

    # Commands

    @property
    def leads(self) -> bool:
        """Whether this process leads and accepts commands."""
        return self.commit_loop is not None and not self.commit_loop.fenced

    def submit(
        self,
        command: Command,
        actor: Actor,
        key: IdempotencyKey | None = None,
        digest: str = "",
        share: Hashable = None,
    ) -> asyncio.Future[Outcome]:
        """Submit a command; raises RefusedError unless this process leads."""
        commit_loop = self.commit_loop
        if commit_loop is None or commit_loop.fenced or self.stopping:
            raise self.not_leading()
        if commit_loop.waiting >= self.settings.waiting:
            raise RefusedError(
                503,
                "too many requests are waiting for a commit; nothing was changed",
                retry_after=1,
            )
        assert self._loop is not None  # a runtime that leads has been started
        future: asyncio.Future[Outcome] = self._loop.create_future()
        submission = Submission(command, actor, key, digest, self.timer(), future, share)
        pending = self._pending
        while pending and pending[0].future is None:
            pending.popleft()
        pending.append(submission)
        commit_loop.submit(submission)
        return future

    def expire_submissions(self, seconds: Seconds = ANSWER_SECONDS) -> None:
        """Answer requests that timed out waiting for a commit: their outcome is unknown."""
        answer = RefusedError(503, UNKNOWN_OUTCOME).answer()
        while self._pending and self._pending[0].arrived <= self.timer() - seconds:
            _resolve(Outcome(self._pending.popleft(), answer))

    def not_leading(self) -> RefusedError:
        """The answer to a write that this process cannot accept, with the leader's address."""
        if self.stopping:
            return RefusedError(503, "this process is stopping; nothing was changed", retry_after=1)
        if self.source is not None:
            return RefusedError(403, self.source.read_only_message)
        leader = self.leader
        if leader is None:
            return RefusedError(
                503, "no process leads at the moment; nothing was changed, try again", retry_after=1
            )
        return RefusedError(
            503,
            f"this process does not accept writes; {leader.address} does",
            leader=leader.address,
            retry_after=1,
        )

    def _deliver(self, batch: Batch) -> None:
        """Apply a durable batch to the replica and answer its submissions."""
        self._apply(batch.rows)
        for outcome in batch.outcomes:
            _resolve(outcome)
        self.on_batch(batch)

    def _apply_followed(self, rows: Sequence[Row]) -> None:
        self._apply(rows)
        self.on_followed(rows)

    def _apply(self, rows: Sequence[Row]) -> None:
        try:
            self.replica.apply(rows)
        except Exception as error:
            # The replica lacks committed rows, so its answers would be wrong.
            log.exception("replica failed", seq=self.replica.seq)
            self.fail(f"cannot apply the journal after entry {self.replica.seq}: {error}")

    # Callbacks of the leader elector, called in its thread

    def start_leading(self, epoch: int) -> CommitLoop:
        """Bring the replica up to date and start the commit loop."""
        for rows in _pages(self.store, self.replica.seq):
            self._on_loop(self._apply, rows)
        return self._on_loop(self._start_commit_loop, epoch)

    def stop_leading(self) -> None:
        """Accept no more commands, and follow again."""
        self._on_loop(self._drop_commit_loop)

    def finish_commits(self, commit_loop: CommitLoop) -> None:
        """Commit what is queued and end the commit loop; blocks until that is done."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(commit_loop.stop(), self._loop).result()

    def new_leader(self, leader: Leader | None) -> None:
        """Note the leader, and set this process's steady time by the leader's."""
        self.leader = leader
        if leader is not None and leader.steady and self.source is None:
            self.steady.follow(leader.steady, leader.lease)

    def store_status(self, problem: str | None) -> None:
        """Note why the store fails, or None when it works; log changes."""
        if self.source is not None:
            return  # the source reports its own problems
        if problem != self.store_trouble:
            self.store_trouble = problem
            if problem is None:
                log.info("store recovered")
            else:
                log.error("store trouble", problem=problem, advice="the service retries by itself")

    def fail(self, why: str) -> None:
        """End the process: it cannot continue."""
        if self.failure is None:
            self.failure = why
            log.critical("cannot go on", problem=why)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._failed)

    def _failed(self) -> None:
        self.expire_submissions(0)
        self.on_failure()

    def _start_commit_loop(self, epoch: int) -> CommitLoop:
        for follower in self._followers:
            follower.stop()
        self.epoch = epoch
        self.leader = None
        self.steady.advance_to(self.state.at - self.state.clock_offset)
        settings, new_id = self.settings, IdGenerator(self.clock)
        self.commit_loop = CommitLoop(
            self.store,
            self._fresh_state,
            epoch,
            self.steady,
            lambda state: CommandHandler(
                state,
                new_id,
                settings.queue_limits,
                self._log_policy_error,
                settings.reservation_rules,
                settings.models,
                settings.states,
                settings.reclaim_rules,
            ),
            self._deliver,
            self.timer,
            delivered=self.replica.seq,
            warn=lambda problem: log.warning("commit loop", problem=problem),
        )
        self.commit_loop.start()
        log.info("leading", epoch=epoch, seq=self.replica.seq)
        self.on_started_leading()
        return self.commit_loop

    def _log_policy_error(self, error: Exception) -> None:
        now = self.timer()
        if now - self._policy_error_logged >= _POLICY_ERROR_SECONDS:
            self._policy_error_logged = now
            log.error("policy failed", policy=self.settings.policy, exc_info=error)

    def _drop_commit_loop(self) -> None:
        self.commit_loop = None
        self.replica.notify()  # streams and polls that only a leader serves must end
        log.info("no longer leading", epoch=self.epoch)
        if not self.stopping:
            self._follow()

    def _follow(self) -> None:
        self._followers = [follower for follower in self._followers if follower.alive]
        follower = Follower(
            self.store,
            self.replica.seq,
            lambda rows: self._on_loop(self._apply_followed, rows),
            self.store_status,
            self.fail,
        )
        self._followers.append(follower)
        follower.start()

    def _on_loop(self, function: Callable[..., T], *args: object) -> T:
        """Call a function on the event loop from another thread; return its result."""

        async def call() -> T:
            return function(*args)

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result()


def _resolve(outcome: Outcome) -> None:
    """Answer a submission, unless it was answered before.

    The submission drops its future, because the future's result refers to the submission; otherwise
    every request would leave a reference cycle to the garbage collector.
    """
    future, outcome.submission.future = outcome.submission.future, None
    if future is not None and not future.done():
        future.set_result(outcome)


def _pages(store: Store, after: int) -> list[list[Row]]:
    """All rows after ``after``, in pages."""
    pages: list[list[Row]] = [[]]
    for row in rows_after(store, after):
        if len(pages[-1]) == PAGE:
            pages.append([])
        pages[-1].append(row)
    return pages
