"""Rehearsals in the background: when they run, what they may cost, and what becomes of the result.

The leader rehearses; followers read the choice in the journal. A rehearsal runs in a process of its
own, and the next one begins only when the time of the last has become a small share of all time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum

import msgspec

from slicewise.config.logs import logger
from slicewise.config.settings import Settings
from slicewise.control.actors import internal
from slicewise.control.commands import ChoosePolicy, Command, KeepLeastLost
from slicewise.control.rehearsal_job import decode_result, job_of
from slicewise.core.errors import SlicewiseError
from slicewise.engine.rehearsal import due
from slicewise.journal.entries import Seconds
from slicewise.policies.rehearsed import DEFAULT_CHOICE
from slicewise.runtime.background_process import BackgroundError
from slicewise.runtime.runtime import Runtime

log = logger()

Rehearse = Callable[[bytes], Awaitable[bytes]]
"""Rehearses an encoded job in another process, and returns the encoded result."""

ACTOR = internal("rehearsal")
LIMIT_SECONDS: Seconds = 900.0
"""A rehearsal that takes longer is given up."""
_LOOK_SECONDS = 1.0
_SHORTEST_PAUSE: Seconds = 5.0
_RETRY_SECONDS: Seconds = 60.0
"""The pause after a failed rehearsal; it doubles with every further failure."""
_LONGEST_RETRY: Seconds = 3600.0


class Activity(StrEnum):
    """What the rehearsals of a process are doing."""

    OFF = "off"
    ELSEWHERE = "elsewhere"
    """Another process leads, and rehearses."""
    LEARNING = "learning"
    """Too little is known of the demand, or of what changed in it."""
    RUNNING = "running"
    WAITING = "waiting"
    """Until the demand changes, or the next one is due."""


class Rehearsals:
    """Rehearses while this process leads."""

    def __init__(self, runtime: Runtime, settings: Settings, rehearse: Rehearse | None) -> None:
        """``rehearse`` is None if the packages for it are missing."""
        self._runtime = runtime
        self._rehearse = rehearse
        self.share = settings.rehearsal_share
        """The largest share of one core."""
        self._enabled = settings.rehearsal_enabled
        self._not_before = float("-inf")
        self.running = False
        self.finished = 0
        """Rehearsals that came to a result in this process."""
        self.failed = 0
        self.seconds: Seconds = 0.0
        """The time that all of them took."""
        self.problem = ""
        """Why the last one failed or had no effect; empty if it did."""
        self._failures = 0
        """Consecutive failures."""

    @property
    def why_off(self) -> str:
        """Why nothing is rehearsed; empty if rehearsals are on."""
        state = self._runtime.state
        if not state.policy.rehearses:
            return f"the policy is set to {state.scheduler.policy.name}"
        if not self._enabled:
            return "rehearsal.enabled is false"
        source = self._runtime.source
        if source is not None and source.choose is None:
            return "this process takes no part in the decisions"
        if self._rehearse is None:
            return "numba is not installed: install slicewise[lab]"
        return ""

    @property
    def activity(self) -> Activity:
        """What the rehearsals are doing."""
        runtime = self._runtime
        if self.why_off:
            return Activity.OFF
        if not self._leads:
            return Activity.ELSEWHERE
        if self.running:
            return Activity.RUNNING
        state = runtime.state
        known = state.policy.standing.rehearsed
        changed = state.policy.standing.changes != state.demand.estimate.changes
        return Activity.WAITING if known and not changed else Activity.LEARNING

    async def run(self) -> None:
        """Rehearse whenever it is due, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await self.look()
            except SlicewiseError as error:  # no longer the leader, or too much to do
                self.problem = str(error)
            except Exception:  # whatever it is, requests are served without rehearsals
                log.exception("rehearsals failed")
                self._back_off(_LONGEST_RETRY)

    async def look(self) -> None:
        """Rehearse once if it is due."""
        runtime = self._runtime
        if self.running or not self._leads or runtime.stopping:
            return
        if runtime.timer() < self._not_before:
            return
        state = runtime.state
        if self.why_off:
            chosen = state.policy.rehearses and state.policy.standing.choice != DEFAULT_CHOICE
            if chosen and runtime.leads:
                await self._submit(KeepLeastLost(self.why_off))
        elif due(state.demand.estimate, state.policy.standing):
            await self._once()

    async def _once(self) -> None:
        """Rehearse, and submit the result."""
        assert self._rehearse is not None
        runtime = self._runtime
        job, begun = job_of(runtime.state), runtime.timer()
        self.running = True
        try:
            result = await self._rehearse(job)
        except BackgroundError as error:
            self._fail(f"the rehearsal {error}")
            return
        finally:
            self.running = False
            took = runtime.timer() - begun
            self.seconds += took
            self._back_off(took / self.share - took)
        try:
            rehearsal = decode_result(result)
        except msgspec.MsgspecError as error:
            self._fail(f"the rehearsal has no usable result: {error}")
            return
        self._failures = 0
        self.finished += 1
        if rehearsal is None:
            self.problem = "too little is known of the demand"
        elif runtime.source is not None and runtime.source.choose is not None:
            self.problem = await runtime.source.choose(rehearsal)
        else:
            await self._submit(ChoosePolicy(rehearsal))

    @property
    def _leads(self) -> bool:
        """Whether this process makes the decisions."""
        runtime = self._runtime
        return runtime.leads if runtime.source is None else runtime.source.leads()

    async def _submit(self, command: Command) -> None:
        """Have the leader decide; a refusal means that the result came too late."""
        before = self._runtime.state.policy.standing.choice
        outcome = await self._runtime.submit(command, ACTOR)
        if outcome.answer.status != 200:
            self.problem = msgspec.json.decode(outcome.answer.body)["detail"]
            return
        self.problem = ""
        policy = self._runtime.state.policy
        if policy.standing.choice != before and policy.chosen is not None:
            log.info("table changed", table=policy.standing.choice.name, why=policy.chosen.why)

    def _fail(self, problem: str) -> None:
        self.failed += 1
        self.problem = problem
        self._back_off(min(_LONGEST_RETRY, _RETRY_SECONDS * 2**self._failures))
        self._failures += 1
        log.warning(
            "rehearsal failed", problem=problem, advice="least-lost or the table in use decides"
        )

    def _back_off(self, pause: Seconds) -> None:
        pause = max(pause, _SHORTEST_PAUSE)
        self._not_before = max(self._not_before, self._runtime.timer() + pause)
