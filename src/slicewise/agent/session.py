"""The agent's session with the service: polls for the desired state and sends reports.

Polling and reporting run in two threads, so a report does not wait for an open poll. Both retry
forever with backoff. While the service is unreachable, only the latest report is kept.
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

from slicewise.agent.desired_state import AnswerError, Desired, parse_desired
from slicewise.agent.reconciler import backoff
from slicewise.agent.service_client import (
    RefusedError,
    ServiceAddress,
    ServiceClient,
    UnreachableError,
)
from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")


@dataclass(frozen=True)
class Intervals:
    """Waiting times of the session, in seconds."""

    poll: float = 25.0
    """How long the service holds a poll open."""
    max_backoff: float = 30.0
    """The longest wait between attempts to reach the service."""
    refused: float = 60.0
    """The wait after a refused request: it stays refused until an operator intervenes."""
    report_delay: float = 0.2
    """How long a report that is not urgent waits for further changes."""


@dataclass(frozen=True)
class _PendingReport:
    body: dict[str, object]
    number: int
    urgent: bool
    since: float


class Session:
    """Sends hello and reports and receives the desired state, until closed or superseded."""

    def __init__(
        self,
        service: ServiceAddress,
        on_desired: Callable[[Desired], None],
        on_superseded: Callable[[str], None],
        on_failure: Callable[[Exception], None],
        intervals: Intervals | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the callbacks; nothing is sent before ``start``.

        ``on_desired`` is called with every desired state, ``on_superseded`` when another agent
        took over this node, and ``on_failure`` on an unexpected exception, which ends its thread.
        """
        self._report_client = ServiceClient(service)
        self._poll_client = ServiceClient(service)
        self._on_desired = on_desired
        self._on_superseded = on_superseded
        self._on_failure = on_failure
        self._intervals = intervals or Intervals()
        self._rng = rng or random.Random()
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = False
        self._hello: dict[str, object] | None = None
        self._life = secrets.token_hex(8)
        """Lets the service distinguish a late hello of this agent from another agent's hello."""
        self._session = ""
        self._after = 0
        """Sequence number of the last desired state."""
        self._failed_sessions = 0
        """Consecutive sessions that ended before a poll was answered."""
        self._report: _PendingReport | None = None
        self._delivered = 0
        """Number of the last delivered report."""
        self._problems: dict[str, str] = {}
        """The current problem with the service, by thread; each is logged once."""
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
            for work, name in ((self._send_next, "agent-report"), (self._poll, "agent-poll"))
        ]

    def start(self) -> None:
        """Start both threads; they wait for the first ``hello``."""
        for thread in self._threads:
            thread.start()

    def hello(self, body: dict[str, object]) -> None:
        """Introduce the node, or introduce it again after a change."""
        with self._changed:
            self._hello, self._session = body, ""
            self._changed.notify_all()

    def report(self, body: dict[str, object], urgent: bool = True) -> None:
        """Queue a report; it replaces an earlier one that was not sent yet."""
        with self._changed:
            before, since = self._report, self._clock()
            if before is not None and before.number != self._delivered:
                urgent, since = urgent or before.urgent, before.since
            number = 1 if before is None else before.number + 1
            self._report = _PendingReport(body, number, urgent, since)
            self._changed.notify_all()

    @property
    def settled(self) -> bool:
        """Whether the service has received the latest report."""
        with self._changed:
            return bool(self._session) and not self._has_unsent_report()

    def close(self, timeout: float = 1.0) -> None:
        """End the session and interrupt requests that wait for an answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        clients = (self._report_client, self._poll_client)
        for client in clients:
            client.interrupt()
        deadline = self._clock() + timeout
        for thread, client in zip(self._threads, clients, strict=True):
            if thread.is_alive():
                thread.join(max(0.0, deadline - self._clock()))
            if not thread.is_alive():
                client.close()

    def _run(self, work: Callable[[], float]) -> None:
        """Repeat ``work`` until closed, waiting after each failure."""
        attempts = 0
        thread = threading.current_thread().name
        while not self._closed:
            try:
                wait = work()
                attempts = 0
                self._clear_problem(thread)
            except UnreachableError as error:
                attempts += 1
                wait = backoff(attempts, self._rng, self._intervals.max_backoff)
                self._set_problem(thread, f"the service is unreachable: {error}")
            except RefusedError as error:
                wait = self._intervals.refused
                self._set_problem(thread, f"the service refused ({error.status}): {error}")
            except SlicewiseError as error:
                wait = self._intervals.refused
                self._set_problem(thread, str(error))
            except Exception as error:
                self._on_failure(error)
                return
            with self._changed:
                if wait and not self._closed:
                    self._changed.wait_for(lambda: self._closed, wait)

    def _send_next(self) -> float:
        """Send the hello or the report that is due; return how long to wait afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._must_send())
            report, hello, session = self._report, self._hello, self._session
            if report is not None and not report.urgent and session:
                # Wait for more changes: work that has just started may finish at once.
                left = report.since + self._intervals.report_delay - self._clock()
                if left > 0 and self._changed.wait_for(
                    lambda: self._closed or self._report is not report, left
                ):
                    return 0.0
        if self._closed or hello is None:
            return 0.0
        if not session:
            body = {"life": self._life, **hello}
            answer = self._report_client.call("POST", "/v1/agent/hello", body)
            self._begin(answer, hello)
            if self._failed_sessions > 1:
                return backoff(self._failed_sessions - 1, self._rng, self._intervals.max_backoff)
        elif report is not None:
            body = {"session": session, **report.body}
            try:
                self._report_client.call("POST", "/v1/agent/report", body)
            except RefusedError as error:
                if not self._ends_session(error, session):
                    raise
                return 0.0
            with self._changed:
                if session == self._session:
                    self._delivered = report.number
        return 0.0

    def _must_send(self) -> bool:
        return self._hello is not None and (not self._session or self._has_unsent_report())

    def _has_unsent_report(self) -> bool:
        return self._report is not None and self._report.number != self._delivered

    def _begin(self, answer: object, hello: dict[str, object]) -> None:
        """Begin the session that the service opened in its answer to hello."""
        session = answer.get("session") if isinstance(answer, dict) else None
        if not isinstance(session, str) or not session or not isinstance(answer, dict):
            raise AnswerError("the service's answer to hello contains no session")
        with self._changed:
            if hello is not self._hello:
                return  # The node changed during the call: another hello follows.
            self._session, self._after, self._delivered = session, 0, 0
            self._changed.notify_all()
        _log.info("registered at the service as node %s", answer.get("node"))

    def _poll(self) -> float:
        """Poll once for a change of the desired state; return how long to wait afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._session))
            session, after = self._session, self._after
        if self._closed:
            return 0.0
        wait = self._intervals.poll
        path = f"/v1/agent/desired?session={quote(session, safe='')}&after={after}&wait={wait:g}"
        started = self._clock()
        try:
            answer = self._poll_client.call("GET", path, timeout=wait + 15)
        except RefusedError as error:
            if not self._ends_session(error, session):
                raise
            return 0.0
        desired = parse_desired(answer)
        with self._changed:
            if session != self._session or self._closed:
                return 0.0
            self._after, self._failed_sessions = desired.seq, 0
            if desired.seq < after and self._report is not None:
                # The service was restored from a backup and may lack the last report: resend it.
                self._report = replace(self._report, number=self._report.number + 1)
                self._changed.notify_all()
        self._on_desired(desired)
        # Avoid a busy loop if the service does not hold polls open.
        too_fast = desired.seq == after and self._clock() - started < min(1.0, wait / 2)
        return backoff(1, self._rng) if too_fast else 0.0

    def _ends_session(self, error: RefusedError, session: str) -> bool:
        """Handle the end of a session; return False if the refusal has another reason."""
        if error.status != 409:
            return False
        with self._changed:
            if session != self._session:
                return True  # This agent's next hello ended it.
            if error.reason == "superseded":
                self._closed = True
                self._changed.notify_all()
            else:
                self._session = ""
                self._failed_sessions += 1
                self._changed.notify_all()
                _log.warning("the service does not know this session: %s", error)
                return True
        self._on_superseded(str(error))
        return True

    def _set_problem(self, thread: str, problem: str) -> None:
        if not self._closed and self._problems.get(thread) != problem:
            self._problems[thread] = problem
            _log.warning("%s; retrying", problem)

    def _clear_problem(self, thread: str) -> None:
        solved = self._problems.pop(thread, None) is not None
        if solved and not self._problems and not self._closed:
            _log.info("the service is reachable again")
