"""A replica of the controller in a simulation, which runs only on request."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.kubernetes import jobs
from tests.kubernetes.fake_api import FakeApi, Json, Stream
from tests.kubernetes.jobs import FakeExecutor

from slicewise.engine.reservation_rules import ReservationRules
from slicewise.kubernetes.conflicts import When
from slicewise.kubernetes.controller import Controller, ControllerOptions
from slicewise.kubernetes.devices.pool_reading import Library
from slicewise.kubernetes.informer import KINDS

LEASE = 15.0
_LIBRARY = Library()
"""Shared by all stories: a cache of geometries."""


class Replica:
    """A controller with simulated watches, writers and clock."""

    def __init__(
        self,
        api: FakeApi,
        name: str,
        clock: Callable[[], float],
        hold_back: When,
        rules: ReservationRules,
        cool_down: float = 0.0,
    ) -> None:
        self.name = name
        self.controller = Controller(
            api,  # type: ignore[arg-type]
            ControllerOptions(
                identity=name,
                lease_seconds=LEASE,
                hold_back=hold_back,
                reservations=rules,
                cool_down=cool_down,
            ),
            clock,
        )
        self.writers, self.recorders = FakeExecutor(), FakeExecutor(2)
        one = self.controller
        one.elector._clock = clock
        one._cycle.clock = clock
        if not rules.after:  # a story is too short for pods to be overtaken often
            one._cycle._queue.was_overtaken = lambda ticket: True  # type: ignore[method-assign]
        one._recorder._clock = clock
        one._recorder._threads = self.recorders  # type: ignore[assignment]
        one._writer._writers = self.writers  # type: ignore[assignment]
        one._writer._claim_client._pause = _pause
        one._handlers._library = _LIBRARY
        self.streams = {kind.name: Stream(api, kind) for kind in KINDS}
        self._clock = clock
        self._wake_at = math.inf
        """When the controller's wait ends without a message."""

    def knows_user(self, claim: Json, pod: str) -> bool:
        """Whether the controller knows that a claim is reserved for a pod, by its uid."""
        entered = self.controller.cache._claims.get(claim["metadata"]["uid"])
        return entered is not None and pod in entered.pods

    def step(self) -> bool:
        """Run a step if the wait of the controller's loop is over; returns whether it is."""
        if self.controller._inbox.empty() and self._clock() < self._wake_at:
            return False
        self.controller.step(0)
        wait = self.controller._timeout()
        self._wake_at = math.inf if wait is None else self._clock() + wait
        return True

    def hear(self, kind: str, many: int = 1) -> bool:
        """Deliver notifications of a watch; returns whether there were any."""
        some = False
        for _ in range(many):
            news = self.streams[kind].next()
            if news is None:
                break
            self.controller._inbox.put(news)
            some = True
        return some

    def hear_all(self) -> bool:
        """Deliver all notifications of all watches."""
        return sum(self.hear(kind, 1 << 30) for kind in self.streams) > 0

    def end(self) -> None:
        """Kill the process."""
        self.writers.kill()
        self.recorders.kill()


def _pause(seconds: float) -> None:
    job = jobs.current()
    assert job is not None
    job.stop_here()
