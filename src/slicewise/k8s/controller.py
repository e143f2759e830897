"""The controller: follows the API, keeps the board, and gives devices to the claims of pods.

One thread decides. Watches bring it news, other threads write for it and report back; both come
through one queue. Whatever it knows it has from the API, so it may be killed at any step: the next
one, or another replica, finds the same and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from slicewise.control.entries import Seconds
from slicewise.engine.queue import Discipline
from slicewise.k8s.board import Board
from slicewise.k8s.deciding import Decider
from slicewise.k8s.ear import Ear
from slicewise.k8s.fitness import Estate
from slicewise.k8s.hand import Done, Hand
from slicewise.k8s.leading import Leadership
from slicewise.k8s.link import Link
from slicewise.k8s.rivals import Rivals, When
from slicewise.k8s.tally import Tally
from slicewise.k8s.telling import Teller
from slicewise.k8s.watching import KINDS, News, Watch
from slicewise.k8s.wishes import Wishes
from slicewise.k8s.writing import Pen

log = logging.getLogger("slicewise.k8s")

_BATCH = 1000
"""How much news is taken in before something is decided."""
_FENCE_SECONDS = 0.5
"""How long until shutting out a former leader is tried again."""
_LEAST_SECONDS = 0.05
"""What has fallen due and cannot be done yet is looked at so much later."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a controller decides."""

    policy: str = "default"
    namespace: str = "slicewise"
    """Where its lease is."""
    lease: str = "slicewise"
    identity: str = "slicewise-0"
    lease_seconds: float = 15.0
    discipline: Discipline = field(default_factory=lambda: Discipline(256, 1024))
    settle_seconds: float = 5.0
    """How long a pod is held back where claims of other classes compete for the same GPUs."""
    hold_back: When = "always"
    """When pods are held back until it is certain that nobody else has their slices."""


@dataclass(frozen=True, slots=True)
class Leads:
    """This replica begins or ceases to lead."""

    leads: bool


class Controller:
    """One replica."""

    def __init__(
        self,
        link: Link,
        options: Options,
        clock: Callable[[], Seconds] = time.time,
        address: Callable[[], str] = lambda: "",
    ) -> None:
        self.options = options
        self.server = link.server
        self.tally = Tally()
        self.wishes = Wishes()
        self.estate = Estate()
        self.board = Board(options.policy, clock, address)
        self.rivals = Rivals(options.settle_seconds, options.hold_back)
        self._inbox: SimpleQueue[News | Done | Leads | None] = SimpleQueue()
        self.leadership = Leadership(
            link,
            options.namespace,
            options.lease,
            options.identity,
            lambda leads: self._inbox.put(Leads(leads)),
            options.lease_seconds,
        )
        self._teller = Teller(link, options.identity, self.tally)
        self._decider = Decider(
            self.board, self.wishes, self.estate, self.rivals, self.tally, options.discipline
        )
        self._hand = Hand(
            Pen(link, self.leadership.valid),
            self.board,
            self.wishes,
            self._decider,
            self.rivals,
            self.tally,
            self._inbox.put,
            lambda claim: self._ear.found(claim),
        )
        self._ear = Ear(
            self.board,
            self.wishes,
            self.estate,
            self.rivals,
            self._decider,
            self._hand,
            self._teller,
            self.tally,
            lambda: self.deciding,
        )
        self._watches = [Watch(link, kind, self._inbox.put) for kind in KINDS]
        self._fenced = 0
        """The last term of ours in which whoever led before can do no harm any more."""
        self._fence_at = 0.0
        """Before this, shutting out whoever led before is not tried again."""
        self._stopping = False
        self.board.journal.trouble = self._ear.trouble

    # For those who look, from other threads

    @property
    def leads(self) -> bool:
        """Whether this replica is the one that decides."""
        return self.leadership.leads

    @property
    def problem(self) -> str:
        """Why this replica does not know the cluster, or could not lead; empty if it does."""
        return self.board.journal.trouble or self.leadership.trouble

    @property
    def waiting(self) -> int:
        """How many pods wait for devices."""
        return self._decider.waiting

    @property
    def watches_down(self) -> int:
        """How many watches do not get through."""
        return len(self._ear.troubles)

    # Life

    @property
    def ready(self) -> bool:
        """Whether everything has been listed and all watches get through."""
        return not self._ear.trouble

    @property
    def deciding(self) -> bool:
        """Whether this replica gives out devices now."""
        # In this order: the term must be the one whose lease was found to run.
        return self.ready and self.leadership.valid() and self._fenced == self.leadership.term

    def run(self) -> None:
        """Decide until stopped."""
        for watch in self._watches:
            watch.start()
        self.leadership.start()
        try:
            while not self._stopping:
                self.step(self._patience())
        finally:
            for watch in self._watches:
                watch.stop()
            self._hand.stop()
            self._teller.stop()
            self.leadership.stop()
            self.board.journal.close()

    def stop(self) -> None:
        """Finish what is being written and give up the lease; from any thread."""
        self._stopping = True
        self._inbox.put(None)

    def _patience(self) -> float | None:
        """How long nothing has to be done unless there is news."""
        if not self.deciding:  # then nothing falls due here
            return _FENCE_SECONDS if self.leadership.leads else None
        due = [t for t in (self.rivals.next_time, self._decider.next_time) if t is not None]
        return max(_LEAST_SECONDS, min(due) - self._decider.clock()) if due else None

    def step(self, seconds: float | None) -> None:
        """Take in what is there, wait for it so long, and then decide what can be decided."""
        try:
            self._take(self._inbox.get(timeout=seconds))
            for _ in range(_BATCH):
                self._take(self._inbox.get_nowait())
        except Empty:
            pass
        self._ear.settle()
        deciding = self.deciding
        if deciding and self._decider.follows:
            self._hand.resume()
        self._decider.follows = not deciding
        self._decider.look()
        self.board.journal.trouble = self._ear.trouble
        if deciding:
            self._decide()
        elif self.ready and self.leadership.leads and self._fenced != self.leadership.term:
            self._fence()

    def _take(self, news: News | Done | Leads | None) -> None:
        match news:
            case Done(call, result, error):
                call(result, error)
            case Leads(leads):
                self._lead(leads)
            case None:  # it is to stop
                pass
            case _:
                self._ear.take(news)

    def _decide(self) -> None:
        self._hand.give_way()
        self._hand.confirm()
        for decision in self._decider.decide():
            self._hand.write(decision)
        for claim in (*self._decider.take_given_up(), *self._decider.take_stuck()):
            self._hand.take_back(claim)
        for key, told in self._decider.take_told():
            if key in self.wishes.pods:
                self._teller.say(self.wishes.pods[key], told)

    # Leading

    def _lead(self, leads: bool) -> None:
        self._fence_at = 0.0
        self.tally.elections += leads
        if not leads:
            log.info("not leading any more")

    def _fence(self) -> None:
        """Shut out whoever led before, unless that was tried just now."""
        now = self._decider.clock()
        if not self._hand.fencing and now >= self._fence_at:
            self._fence_at = now + _FENCE_SECONDS
            self._hand.fence(self.options.identity, partial(self._fenced_now, self.leadership.term))

    def _fenced_now(self, term: int, done: bool) -> None:
        if done and term == self.leadership.term:
            self._fenced = term
            self.rivals.last_seen = self._decider.clock()  # who knows who came before
            log.info("leading as %s", self.options.identity)
