"""A replica of the controller in a simulation: nothing of it moves by itself."""

from __future__ import annotations

from collections.abc import Callable

from tests.k8s_units import jobs
from tests.k8s_units.fake_api import FakeApi, Stream
from tests.k8s_units.jobs import Crew

from slicewise.k8s.controller import Controller, Options
from slicewise.k8s.devices import Library
from slicewise.k8s.rivals import When
from slicewise.k8s.watching import KINDS

LEASE = 15.0
_LIBRARY = Library()
"""What is worked out about a model stays true from one story to the next."""


class Replica:
    """A controller, its watches and its writers, none of which moves by itself."""

    def __init__(
        self, api: FakeApi, name: str, clock: Callable[[], float], hold_back: When
    ) -> None:
        self.name = name
        self.controller = Controller(
            api,  # type: ignore[arg-type]
            Options(identity=name, lease_seconds=LEASE, hold_back=hold_back),
            clock,
        )
        self.writers, self.tellers = Crew(), Crew(2)
        one = self.controller
        one.leadership._clock = clock
        one._decider.clock = clock
        one._decider._avoided._clock = clock
        one._teller._clock = clock
        one._teller._threads = self.tellers  # type: ignore[assignment]
        one._hand._writers = self.writers  # type: ignore[assignment]
        one._hand._pen._pause = _pause
        one._ear._library = _LIBRARY
        self.streams = {kind.name: Stream(api, kind) for kind in KINDS}

    def hear(self, kind: str, many: int = 1) -> bool:
        """Let a watch tell so much; returns whether there was anything."""
        some = False
        for _ in range(many):
            news = self.streams[kind].next()
            if news is None:
                break
            self.controller._inbox.put(news)
            some = True
        return some

    def hear_all(self) -> bool:
        """Let all watches tell everything."""
        return sum(self.hear(kind, 1 << 30) for kind in self.streams) > 0

    def end(self) -> None:
        """The process is killed."""
        self.writers.kill()
        self.tellers.kill()


def _pause(seconds: float) -> None:
    job = jobs.current()
    assert job is not None
    job.stop_here()
