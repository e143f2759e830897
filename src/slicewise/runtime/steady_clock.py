"""Steady time: the basis of service time, unaffected by changes of the wall clock.

The wall clock of a machine can be changed, even by mistake. Its uptime cannot. Steady time advances
with the uptime and is compared with the wall clock: small differences, such as NTP makes all the
time, are corrected slowly. A larger difference is a step. It is held until the wall clock is right
again or an operator accepts the step.

Service time, which leases run on, is steady time plus the accepted steps. Those are in the journal
(`journal.entries.ClockSet`), so every process knows them.
"""

from __future__ import annotations

import math
import threading
import time
from datetime import UTC, datetime
from typing import NamedTuple

from slicewise.config.logs import logger
from slicewise.control.ports import Clock
from slicewise.journal.entries import STEP_SECONDS, Seconds

MAX_SLEW = 0.005
"""The largest relative change of speed that corrects a small difference."""
_SLEW_SECONDS = 100.0
"""About how long it takes to correct a small difference."""
_PAUSE_SECONDS = 0.1
"""If reading both clocks took longer than this, their difference is meaningless."""
_RUNNING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

log = logger()


def running_time() -> Seconds:
    """The uptime of the machine, including suspended time if the system counts it."""
    return time.clock_gettime(_RUNNING)


class _Line(NamedTuple):
    """Time as a linear function of uptime."""

    at: Seconds
    running: Seconds
    rate: float

    def after(self, running: Seconds) -> Seconds:
        return self.at + (running - self.running) * self.rate


class SteadyClock:
    """Returns steady time and detects steps of the wall clock; thread-safe."""

    def __init__(self, wall: Clock = time.time, running: Clock = running_time) -> None:
        self.wall = wall
        self._running = running
        self._line = _Line(wall(), running(), 1.0)
        self._changing = threading.Lock()
        self._logged: Seconds | None = None
        """The held step as it was logged; None if no step is held."""
        self.step: Seconds = 0.0
        """How far the wall clock is ahead of service time while a step is held; otherwise 0."""
        self.steps = 0
        """The number of steps so far."""
        self._unknown: Seconds = 0.0
        """The longest time the service may have been stopped; 0 once that time is known."""

    def __call__(self) -> Seconds:
        """Return steady time."""
        return self._line.after(self._running())

    def begin(self, reached: Seconds, accepted: Seconds, most: Seconds) -> None:
        """Continue from the last time of the previous run, ``reached``; 0 if there was none.

        The wall clock tells how long the service was stopped, unless it is behind ``reached`` or
        ahead by more than ``most``. Then time continues as if the service had not been stopped,
        until the wall clock shows a plausible time.
        """
        now = self.wall() - accepted
        with self._changing:
            self._unknown = 0.0
            if reached and not reached <= now <= reached + most:
                now, self._unknown = reached, most
            self._line = _Line(now, self._running(), 1.0)

    def advance_to(self, earliest: Seconds) -> None:
        """Advance to this time, unless it is in the past."""
        self._keep_within(earliest, math.inf)

    def follow(self, leader: Seconds, late: Seconds) -> None:
        """Adopt the leader's steady time, which was stored at most ``late`` seconds ago."""
        self._keep_within(leader, leader + late)
        self._unknown = 0.0

    def _keep_within(self, earliest: Seconds, latest: Seconds) -> None:
        with self._changing:
            running = self._running()
            if not earliest <= self._line.after(running) <= latest:
                self._line = _Line(earliest, running, 1.0)

    def compare(self, accepted: Seconds) -> None:
        """Compare the wall clock with service time: correct the speed, or hold and log a step."""
        with self._changing:
            before = self._running()
            wall = self.wall()
            running = self._running()
            if running - before > _PAUSE_SECONDS:
                return
            now = self._line.after(running)
            away = wall - accepted - now
            rate = 1.0
            if 0 <= away <= self._unknown:
                now, away, self._unknown = now + away, 0.0, 0.0
            elif abs(away) < STEP_SECONDS:
                self._unknown = 0.0
                rate += max(-MAX_SLEW, min(MAX_SLEW, away / _SLEW_SECONDS))
            self._line = _Line(now, running, rate)
        self._log_step(away, wall)

    def _log_step(self, away: Seconds, wall: Seconds) -> None:
        logged = self._logged
        self.step = 0.0 if abs(away) < STEP_SECONDS else away
        if not self.step:
            if logged is not None:
                self._logged = None
                log.warning("clock step over", wall=_moment(wall), service=_moment(wall - away))
        elif logged is None or abs(away - logged) >= STEP_SECONDS:
            self._logged = away
            self.steps += 1
            log.error(
                "clock step held",
                wall=_moment(wall),
                service=_moment(wall - away),
                step_seconds=round(away, 3),
                advice="correct the wall clock; if it is correct, run 'slicewise clock accept'",
            )


def _moment(seconds: Seconds) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError):  # outside the years of datetime
        return f"{seconds:.3f}"
