"""The plant: one process's part in the service, from start to stop.

It always has a replica that follows the journal. When the keeper wins the lease there is a writer
as well, and rows come from it directly instead of by way of the store.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future as ThreadFuture
from typing import TypeVar

from slicewise.control.actors import Actor
from slicewise.control.allocation_index import AllocationIndex
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Command
from slicewise.control.entries import Row, Seconds
from slicewise.control.ports import Clock, Key, Leader, Store, rows_after
from slicewise.control.state import State
from slicewise.control.writer import UNKNOWN_OUTCOME, Batch, Job, Told, Writer, load
from slicewise.service.follower import PAGE, Follower
from slicewise.service.keeper import Keeper
from slicewise.service.logs import logger
from slicewise.service.replica import Replica
from slicewise.service.settings import Settings
from slicewise.service.source import Source
from slicewise.service.steady import SteadyClock

T = TypeVar("T")

log = logger()

ANSWER_SECONDS = 60.0
"""How long a request waits for the writer before it is told that nobody knows."""


class Ids:
    """Makes ids nobody has: a letter, the time, and 60 random bits, in letters and digits.

    What is made at about the same time is kept side by side in the database's indexes, so that a
    commit changes few pages of them: with random ids alone it writes several times as much.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spare: list[str] = []

    def __call__(self, letter: str) -> str:
        """Another one; they are made a hundred at a time, which is five times as fast."""
        if not self._spare:
            moment = int(self._clock() * 1000)  # 40 bits of it: for 34 years, then again
            when = bytes(moment >> bits & 0xFF for bits in range(35, -1, -5)).translate(_LETTERS)
            text = secrets.token_bytes(1200).translate(_LETTERS).decode()
            self._spare = [when.decode() + text[at : at + 12] for at in range(0, len(text), 12)]
        return letter + self._spare.pop()


_LETTERS = b"234567abcdefghijklmnopqrstuvwxyz" * 8
"""By the low five bits of a byte; a later moment is behind an earlier one, as text."""


class Plant:
    """Follows, leads, and takes commands while it leads."""

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
        # What another system decides is stamped by the wall clock, and shown by it.
        self.steady = steady or (
            SteadyClock() if source is None else SteadyClock(running=time.time)
        )
        self.timer = timer
        self.address = settings.address
        self.replica = Replica(self._listed_state())
        self.loaded = False
        self.history = ""
        """The name of the history that the journal tells."""
        self.writer: Writer | None = None
        """While this process leads."""
        self.epoch = 0
        self.leader: Leader | None = None
        """Who leads, as far as is known, when it is not this process."""
        self.store_trouble: str | None = None
        self.failure: str | None = None
        """Why this process cannot go on, if so."""
        self.on_failure: Callable[[], None] = lambda: None
        self.on_office: Callable[[], None] = lambda: None
        """Called on the loop when this process begins to lead."""
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        self.on_followed: Callable[[Sequence[Row]], None] = lambda rows: None
        """Called on the loop with rows that somebody else committed."""
        self.furnished = False
        """Whether there is a tenant to act for and a token to begin with."""
        self.stopping = False
        self._policy_error_logged = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: deque[Job] = deque()
        """What was handed in and has not been told yet, as far as is known; the oldest first."""
        self._followers: list[Follower] = []
        """The last one follows, unless this process leads; others are about to end."""
        holder = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._keeper = Keeper(
            store,
            self,
            holder,
            lambda: self.address,
            settings.lease_seconds,
            settings.answers_hours * 3600,
            settings.journal_days * 86400,
            settings.journal_archive,
            self.clock,
            self.steady,
        )

    @property
    def state(self) -> State:
        """What is committed."""
        return self.replica.state

    # Time

    def clock(self) -> Seconds:
        """Service time: it does not jump unless an operator has accepted a step."""
        return self.steady() + self.state.accepted

    def latest(self) -> Seconds:
        """The later of service time and the wall clock: by it tokens expire.

        None is valid for longer because a step of the wall clock is held.
        """
        return max(self.clock(), self.steady.wall())

    def look_at_clock(self) -> None:
        """Compare the wall clock with service time."""
        self.steady.look(self.state.accepted)

    def _fresh_state(self) -> State:
        return State(self.settings.policy, self.settings.discipline)

    def _listed_state(self) -> State:
        """A state for reads: its allocations can be listed."""
        return State(self.settings.policy, self.settings.discipline, AllocationIndex())

    # Start and stop

    async def start(self) -> None:
        """Read the journal, then follow it and try to lead; returns when it is known who does."""
        self._loop = asyncio.get_running_loop()
        state = await self.in_thread(load, self.store, self._listed_state())
        reached = await self.in_thread(self.store.reached)
        if self.source is None:
            # The last entry may be later than what was kept along with the lease.
            reached = max(reached, state.at - state.accepted)
            most = self.settings.clock_max_gap_hours * 3600
            self.steady.begin(reached, state.accepted, most)
        self.history = (await self.in_thread(self.store.span)).history
        self.replica.state = state
        self.loaded = True
        self._follow()
        self._keeper.start()
        await self.in_thread(self._keeper.first_try.wait)

    async def stop(self) -> None:
        """Finish what was handed in, step down, and end all threads."""
        self.stopping = True
        self.replica.wake()
        await self.in_thread(self._keeper.stop)
        for follower in self._followers:
            follower.stop()
            await self.in_thread(follower.join)

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """Call what may block, without anybody else waiting for it."""
        return await asyncio.get_running_loop().run_in_executor(None, function, *args)

    # Commands

    @property
    def leads(self) -> bool:
        """Whether commands are taken here."""
        return self.writer is not None and not self.writer.fenced

    def ask(
        self,
        command: Command,
        actor: Actor,
        key: Key | None = None,
        digest: str = "",
        share: Hashable = None,
    ) -> asyncio.Future[Told]:
        """Hand in a command; refused where this process does not lead."""
        writer = self.writer
        if writer is None or writer.fenced or self.stopping:
            raise self.elsewhere()
        if writer.waiting >= self.settings.waiting:
            raise RefusedError(
                503, "too many requests wait to be written; nothing was changed", retry_after=1
            )
        assert self._loop is not None  # only a plant that has been started leads
        told: asyncio.Future[Told] = self._loop.create_future()
        job = Job(command, actor, key, digest, self.timer(), told, share)
        asked = self._asked
        while asked and asked[0].tell is None:
            asked.popleft()
        asked.append(job)
        writer.submit(job)
        return told

    def give_up_on_old(self, seconds: Seconds = ANSWER_SECONDS) -> None:
        """Tell those who have waited for the writer for so long that nobody knows."""
        answer = RefusedError(503, UNKNOWN_OUTCOME).answer()
        while self._asked and self._asked[0].arrived <= self.timer() - seconds:
            _tell(Told(self._asked.popleft(), answer))

    def elsewhere(self) -> RefusedError:
        """What those are told who want something written that this process cannot write."""
        if self.stopping:
            return RefusedError(503, "this process is stopping; nothing was changed", retry_after=1)
        if self.source is not None:
            return RefusedError(403, self.source.change_it_there)
        leader = self.leader
        if leader is None:
            return RefusedError(
                503, "nobody leads at the moment; nothing was changed, try again", retry_after=1
            )
        return RefusedError(
            503,
            f"this process does not take writes; {leader.address} does",
            leader=leader.address,
            retry_after=1,
        )

    def _deliver(self, batch: Batch) -> None:
        """Called by the writer, in its thread, once a batch is durable."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._take_batch, batch)

    def _take_batch(self, batch: Batch) -> None:
        self._take(batch.rows)
        self.on_batch(batch)
        for told in batch.told:
            _tell(told)

    def _take_followed(self, rows: Sequence[Row]) -> None:
        self._take(rows)
        self.on_followed(rows)

    def _take(self, rows: Sequence[Row]) -> None:
        try:
            self.replica.take(rows)
        except Exception as error:
            # What was committed cannot be followed: answers from here would be wrong.
            log.exception("replica failed", seq=self.replica.seq)
            self.fail(f"the journal cannot be followed behind entry {self.replica.seq}: {error}")

    # What the keeper asks for, from its thread

    def take_office(self, epoch: int) -> Writer:
        """Bring the replica up to date and begin to write."""
        for rows in _pages(self.store, self.replica.seq):
            self._on_loop(self._take, rows)
        return self._on_loop(self._begin_office, epoch)

    def leave_office(self) -> None:
        """Take no more writes, and follow again."""
        self._on_loop(self._end_office)

    def leader_is(self, leader: Leader | None) -> None:
        """Another process leads, or none; time goes by the leader's, whatever clock is here."""
        self.leader = leader
        if leader is not None and leader.steady and self.source is None:
            self.steady.follow(leader.steady, leader.lease)

    def trouble(self, what: str | None) -> None:
        """The store cannot be reached, or can be again."""
        if self.source is not None:
            return  # the source says itself what is wrong with it
        if what != self.store_trouble:
            self.store_trouble = what
            if what is None:
                log.info("store answers again")
            else:
                log.error("store trouble", problem=what, advice="the service tries again by itself")

    def warn(self, what: str) -> None:
        """Something should be looked at, and keeps the process from nothing."""
        log.error("warning", problem=what)

    def fail(self, why: str) -> None:
        """The process cannot go on."""
        if self.failure is None:
            self.failure = why
            log.critical("cannot go on", problem=why)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._failed)

    def _failed(self) -> None:
        self.give_up_on_old(0)  # whoever waits would wait in vain
        self.on_failure()

    def _begin_office(self, epoch: int) -> Writer:
        for follower in self._followers:
            follower.stop()
        self.epoch = epoch
        self.leader = None
        self.steady.go_on_from(self.state.at - self.state.accepted)
        self.writer = Writer(
            self.store,
            self._fresh_state,
            epoch,
            self.steady,
            Ids(self.clock),
            self._deliver,
            self.timer,
            delivered=self.replica.seq,
            # All Python on one thread: two that take turns hundreds of times a second are slower.
            decide_in=self._on_loop,
            warn=lambda problem: log.warning("writer", problem=problem),
            queued_per_tenant=self.settings.queued_per_tenant,
            on_policy_error=self._policy_failed,
            most_models=self.settings.models,
            most_states=self.settings.states,
        )
        self.writer.start()
        log.info("leading", epoch=epoch, seq=self.replica.seq)
        self.on_office()
        return self.writer

    def _policy_failed(self, error: Exception) -> None:
        """Log what a policy raised, once a second at most: whoever waits is tried often."""
        now = self.timer()
        if now - self._policy_error_logged >= 1.0:
            self._policy_error_logged = now
            log.error("policy failed", policy=self.settings.policy, exc_info=error)

    def _end_office(self) -> None:
        self.writer = None
        self.replica.wake()  # those whom only a leader answers must look elsewhere
        log.info("not leading any more", epoch=self.epoch)
        if not self.stopping:
            self._follow()

    def _follow(self) -> None:
        self._followers = [follower for follower in self._followers if follower.alive]
        follower = Follower(
            self.store,
            self.replica.seq,
            lambda rows: self._on_loop(self._take_followed, rows),
            self.trouble,
            self.fail,
        )
        self._followers.append(follower)
        follower.start()

    def _on_loop(self, function: Callable[..., T], *args: object) -> T:
        """Call on the event loop from another thread, and wait for the outcome."""
        done: ThreadFuture[T] = ThreadFuture()

        def call() -> None:
            try:
                done.set_result(function(*args))
            except BaseException as error:
                done.set_exception(error)

        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)
        return done.result()


def _tell(told: Told) -> None:
    """Tell whoever asked, once.

    The job lets go of them, since what they are told holds the job: a ring of objects for every
    request would be left to the collector of garbage.
    """
    future: asyncio.Future[Told] | None = told.job.tell  # type: ignore[assignment]
    told.job.tell = None
    if future is not None and not future.done():
        future.set_result(told)


def _pages(store: Store, after: int) -> list[list[Row]]:
    """All rows behind one, in pages."""
    pages: list[list[Row]] = [[]]
    for row in rows_after(store, after):
        if len(pages[-1]) == PAGE:
            pages.append([])
        pages[-1].append(row)
    return pages
