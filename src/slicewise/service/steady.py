"""Steady time: what the service's own time is made of, which setting a clock does not move.

A machine's wall clock can be set, by mistake as well, and then shows another day. For how long the
machine has been running cannot be set. Steady time therefore runs with the machine. The wall clock
is only compared with it: small differences are followed slowly, as NTP makes them all the time, and
a step is held until the wall clock is right again or an operator accepts it.

Service time, which leases run on, is steady time and the steps that were accepted; those are in the
journal (see `control.entries.ClockSet`), so every process knows them.
"""

from __future__ import annotations

import math
import threading
import time
from datetime import UTC, datetime
from typing import NamedTuple

from slicewise.control.entries import STEP_SECONDS, Seconds
from slicewise.control.ports import Clock
from slicewise.service.logs import logger

MAX_SLEW = 0.005
"""By which share steady time may run faster or slower to follow the wall clock."""
_SLEW_SECONDS = 100.0
"""In about what time a small difference is made up."""
_PAUSE_SECONDS = 0.1
"""When reading both clocks took longer, their difference says nothing."""
_RUNNING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

log = logger()


def running_time() -> Seconds:
    """For how long the machine has been running, asleep or not where the system can tell."""
    return time.clock_gettime(_RUNNING)


class _Line(NamedTuple):
    """Time as it runs: what it was when the machine had been running for so long, and how fast."""

    at: Seconds
    running: Seconds
    rate: float

    def after(self, running: Seconds) -> Seconds:
        return self.at + (running - self.running) * self.rate


class SteadyClock:
    """Tells steady time, and watches the wall clock; safe to call from any thread."""

    def __init__(self, wall: Clock = time.time, running: Clock = running_time) -> None:
        self.wall = wall
        self._running = running
        self._line = _Line(wall(), running(), 1.0)
        self._changing = threading.Lock()
        self._told: Seconds | None = None
        """The step that was logged, while one is held."""
        self.step: Seconds = 0.0
        """By how much the wall clock is ahead of service time, while that is held; 0 otherwise."""
        self.steps = 0
        """How many steps there were."""
        self._unknown: Seconds = 0.0
        """For how long at most the service may have been stopped, while it is not known how long
        it was."""

    def __call__(self) -> Seconds:
        """Steady time."""
        return self._line.after(self._running())

    def begin(self, reached: Seconds, accepted: Seconds, most: Seconds) -> None:
        """Go on from the time that was reached before the process started, if there is one.

        The wall clock says how long ago that was, unless it is behind, or ahead by more than
        ``most``: then time goes on as if the service had not been stopped, until the wall clock
        shows a time that can be.
        """
        now = self.wall() - accepted
        with self._changing:
            self._unknown = 0.0
            if reached and not reached <= now <= reached + most:
                now, self._unknown = reached, most
            self._line = _Line(now, self._running(), 1.0)

    def go_on_from(self, earliest: Seconds) -> None:
        """Be no earlier than this."""
        self._keep_within(earliest, math.inf)

    def follow(self, leader: Seconds, late: Seconds) -> None:
        """Go by a leader whose time was this when it was kept, at most so long ago."""
        self._keep_within(leader, leader + late)
        self._unknown = 0.0

    def _keep_within(self, earliest: Seconds, latest: Seconds) -> None:
        with self._changing:
            running = self._running()
            if not earliest <= self._line.after(running) <= latest:
                self._line = _Line(earliest, running, 1.0)

    def look(self, accepted: Seconds) -> None:
        """Compare the wall clock with service time: follow it, or hold and tell a step."""
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
        self._judge(away, wall)

    def _judge(self, away: Seconds, wall: Seconds) -> None:
        told = self._told
        self.step = 0.0 if abs(away) < STEP_SECONDS else away
        if not self.step:
            if told is not None:
                self._told = None
                log.warning("clock step over", wall=_moment(wall), service=_moment(wall - away))
        elif told is None or abs(away - told) >= STEP_SECONDS:
            self._told = away
            self.steps += 1
            log.error(
                "clock step held",
                wall=_moment(wall),
                service=_moment(wall - away),
                step_seconds=round(away, 3),
                advice="set the wall clock right; if it is right, run 'slicewise clock accept'",
            )


def _moment(seconds: Seconds) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError):  # no year of ours
        return f"{seconds:.3f}"
