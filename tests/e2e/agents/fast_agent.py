"""The agent with shorter waits, for tests.

Only intervals change: how often the driver is read, how long attempts wait for each other, and how
long a poll is held open. ``FAST_AGENT_MANAGER`` names a program that counts as another MIG manager.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace

from slicewise.agent import __main__ as command
from slicewise.agent import agent, exclusivity, reconciler, service_client, session
from slicewise.agent.driver import Driver

FRACTION = 0.02
REFRESH_SECONDS = 0.25
MAX_BACKOFF_SECONDS = 0.5
TIMEOUT_SECONDS = 3.0
INTERVALS = session.Intervals(poll=1.0, max_backoff=0.3, refused=0.3, report_delay=0.01)


def shorten_waits() -> None:
    """Shorten the waits of the agent in this process."""
    original = reconciler.backoff

    def backoff(
        attempts: int, rng: random.Random, longest: float = reconciler.MAX_BACKOFF
    ) -> float:
        limit = min(longest, MAX_BACKOFF_SECONDS / FRACTION)
        return original(attempts, rng, limit) * FRACTION

    run = agent.run

    def run_fast(options: agent.AgentOptions, open_driver: Callable[[], Driver]) -> int:
        return run(replace(options, intervals=INTERVALS), open_driver)

    other = os.environ.get("FAST_AGENT_MANAGER")
    if other:
        exclusivity.MANAGERS[other] = "a manager of the tests"
    for module in (reconciler, session):
        setattr(module, "backoff", backoff)  # noqa: B010
    setattr(agent, "REFRESH_SECONDS", REFRESH_SECONDS)  # noqa: B010
    setattr(agent, "MANAGERS_SECONDS", REFRESH_SECONDS)  # noqa: B010
    setattr(service_client, "_TIMEOUT", TIMEOUT_SECONDS)  # noqa: B010
    service_client.ServiceClient.call.__defaults__ = (None, TIMEOUT_SECONDS)
    setattr(command, "run", run_fast)  # noqa: B010


if __name__ == "__main__":
    shorten_waits()
    sys.exit(command.main())
