"""The agent's talk with the service: one poll open at a time, reports when there is news.

Two threads, so that a report need not wait for a poll. Both try again for ever, with growing waits;
what the agent wants to say meanwhile is kept, the newest of it only.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from urllib.parse import quote

from slicewise.agent.carrying import growing_wait
from slicewise.agent.link import Link, RefusedError, Service, UnreachableError
from slicewise.agent.wanted import AnswerError, Desired, read_desired
from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")


@dataclass(frozen=True)
class Pace:
    """How long things take when nothing happens, in seconds."""

    poll: float = 25.0
    """How long a poll is held open by the service."""
    longest: float = 30.0
    """The longest wait between attempts to reach the service."""
    slow: float = 60.0
    """Between attempts that were refused: somebody has to do something first."""
    linger: float = 0.2
    """How long news that is not urgent waits for more."""


@dataclass(frozen=True)
class _Letter:
    body: dict[str, object]
    number: int
    urgent: bool
    since: float


class Conversation:
    """Hello, desired state and reports, until it is closed or superseded."""

    def __init__(
        self,
        service: Service,
        wanted: Callable[[Desired], None],
        ended: Callable[[str], None],
        failed: Callable[[Exception], None],
        pace: Pace | None = None,
        chance: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wanted`` gets every desired state; ``ended`` hears that another agent is here.

        ``failed`` hears of a fault of our own, after which there is no more talk.
        """
        self._links = [Link(service), Link(service)]
        self._wanted = wanted
        self._ended = ended
        self._failed = failed
        self._pace = pace or Pace()
        self._chance = chance or random.Random()
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False
        self._hello: dict[str, object] | None = None
        self._life = secrets.token_hex(8)
        """By which the service tells a late hello of this agent from another agent's."""
        self._session = ""
        self._after = 0
        self._in_vain = 0
        """Sessions that were over before anything was heard in them."""
        self._letter: _Letter | None = None
        self._delivered = 0
        self._lost: dict[str, str] = {}
        """What is wrong with the service, by thread; said once."""
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for work, name in ((self._speak, "agent-report"), (self._ask, "agent-poll"))
        ]

    def start(self) -> None:
        """Begin to talk; there is nothing to say before the first ``hello``."""
        for thread in self._threads:
            thread.start()

    def hello(self, body: dict[str, object]) -> None:
        """Introduce the node, or do it anew because it changed."""
        with self._changed:
            self._hello, self._session = body, ""
            self._changed.notify_all()

    def report(self, body: dict[str, object], urgent: bool = True) -> None:
        """Send this as soon as possible; what was not sent before is out of date."""
        with self._changed:
            before, since = self._letter, self._clock()
            if before is not None and before.number != self._delivered:
                urgent, since = urgent or before.urgent, before.since
            number = 1 if before is None else before.number + 1
            self._letter = _Letter(body, number, urgent, since)
            self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """Whether the service has heard all there was to say."""
        with self._changed:
            return bool(self._session) and (
                self._letter is None or self._delivered == self._letter.number
            )

    def close(self, patience: float = 1.0) -> None:
        """End the talk; what waits for an answer no longer does."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for link in self._links:
            link.interrupt()
        until = self._clock() + patience
        for thread, link in zip(self._threads, self._links, strict=True):
            if thread.is_alive():
                thread.join(max(0.0, until - self._clock()))
            if not thread.is_alive():
                link.close()

    # The two threads

    def _run(self, work: Callable[[], float]) -> None:
        """Do a piece of work again and again, with a wait after what went wrong."""
        attempts = 0
        name = threading.current_thread().name
        while not self._closed:
            try:
                wait = work()
                attempts = 0
                self._said_well(name)
            except UnreachableError as error:
                attempts += 1
                wait = growing_wait(attempts, self._chance, self._pace.longest)
                self._say_once(name, f"the service is not there: {error}")
            except RefusedError as error:
                wait = self._pace.slow
                self._say_once(name, f"the service refuses ({error.status}): {error}")
            except SlicewiseError as error:
                wait = self._pace.slow
                self._say_once(name, str(error))
            except Exception as error:
                self._failed(error)
                return
            with self._changed:
                if wait and not self._closed:
                    self._changed.wait_for(lambda: self._closed, wait)

    def _speak(self) -> float:
        """Say hello or send a report, whichever is due."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._something_to_say())
            letter, hello, session = self._letter, self._hello, self._session
            if letter is not None and not letter.urgent and session:
                # More is about to come: what is only begun need not be told if it ends at once.
                left = letter.since + self._pace.linger - self._clock()
                if left > 0 and self._changed.wait_for(
                    lambda: self._closed or self._letter is not letter, left
                ):
                    return 0.0
        if self._closed or hello is None:
            return 0.0
        link = self._links[0]
        if not session:
            answer = link.call("POST", "/v1/agent/hello", {"life": self._life, **hello})
            self._begin(answer, hello)
            if self._in_vain > 1:
                return growing_wait(self._in_vain - 1, self._chance, self._pace.longest)
        elif letter is not None:
            try:
                link.call("POST", "/v1/agent/report", {"session": session, **letter.body})
            except RefusedError as error:
                if not self._over(error, session):
                    raise
                return 0.0
            with self._changed:
                if session == self._session:
                    self._delivered = letter.number
        return 0.0

    def _something_to_say(self) -> bool:
        if self._hello is None:
            return False
        news = self._letter is not None and self._letter.number != self._delivered
        return not self._session or news

    def _begin(self, answer: object, hello: dict[str, object]) -> None:
        session = answer.get("session") if isinstance(answer, dict) else None
        if not isinstance(session, str) or not session or not isinstance(answer, dict):
            raise AnswerError("the service's answer to hello holds no session")
        with self._changed:
            if hello is not self._hello:
                return  # The node has changed meanwhile: another hello follows.
            self._session, self._after, self._delivered = session, 0, 0
            self._changed.notify_all()
        _log.info("the service knows this node as %s", answer.get("node"))

    def _ask(self) -> float:
        """Wait for what is wanted to change."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._session))
            session, after = self._session, self._after
        if self._closed:
            return 0.0
        wait = self._pace.poll
        path = f"/v1/agent/desired?session={quote(session, safe='')}&after={after}&wait={wait:g}"
        begun = self._clock()
        try:
            answer = self._links[1].call("GET", path, patience=wait + 15)
        except RefusedError as error:
            if not self._over(error, session):
                raise
            return 0.0
        desired = read_desired(answer)
        with self._changed:
            if session != self._session or self._closed:
                return 0.0
            self._after, self._in_vain = desired.seq, 0
            if desired.seq < after and self._letter is not None:
                # It was restored from a backup, and may not know what it was told: once more.
                self._letter = replace(self._letter, number=self._letter.number + 1)
                self._changed.notify_all()
        self._wanted(desired)
        # A service that does not hold polls open must not be asked without end.
        hurried = desired.seq == after and self._clock() - begun < min(1.0, wait / 2)
        return growing_wait(1, self._chance) if hurried else 0.0

    def _over(self, error: RefusedError, session: str) -> bool:
        """Deal with a session that is over; False where something else was refused."""
        if error.status != 409:
            return False
        with self._changed:
            if session != self._session:
                return True  # It was ended by our own next hello.
            if error.reason == "superseded":
                self._closed = True
                self._changed.notify_all()
            else:
                self._session = ""
                self._in_vain += 1
                self._changed.notify_all()
                _log.warning("the service does not know this session: %s", error)
                return True
        self._ended(str(error))
        return True

    def _say_once(self, name: str, sentence: str) -> None:
        if not self._closed and self._lost.get(name) != sentence:
            self._lost[name] = sentence
            _log.warning("%s; trying again", sentence)

    def _said_well(self, name: str) -> None:
        if self._lost.pop(name, None) is not None and not self._lost and not self._closed:
            _log.info("the service is there again")
