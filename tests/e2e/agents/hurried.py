"""The agent as it is, in a hurry: the same program, with waits that are a fraction of its own.

Only how long it waits is changed, and nothing of what it does: how often it looks at the driver,
how long it waits between attempts, and how long a poll is held open. ``HURRIED_MANAGER`` names a
program that it takes for another MIG manager.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace

from slicewise.agent import __main__ as command
from slicewise.agent import agent, carrying, conversation, link, managers
from slicewise.agent.driver import Driver

FRACTION = 0.02
LOOK_SECONDS = 0.25
SELDOM_SECONDS = 0.5
TIMEOUT_SECONDS = 3.0
PACE = conversation.Pace(poll=1.0, longest=0.3, slow=0.3, linger=0.01)


def hurry() -> None:
    """Let the agent of this process wait less."""
    patient = carrying.growing_wait

    def wait(attempts: int, chance: random.Random, longest: float = carrying.LONGEST_WAIT) -> float:
        shorter = min(longest, SELDOM_SECONDS / FRACTION)
        return patient(attempts, chance, shorter) * FRACTION

    run = agent.run

    def run_hurried(options: agent.Options, driver: Callable[[], Driver]) -> int:
        return run(replace(options, pace=PACE), driver)

    other = os.environ.get("HURRIED_MANAGER")
    if other:
        managers.MANAGERS[other] = "a manager of the tests"
    for module in (carrying, conversation):
        setattr(module, "growing_wait", wait)  # noqa: B010 - it is no export of theirs
    setattr(agent, "LOOK_SECONDS", LOOK_SECONDS)  # noqa: B010
    setattr(agent, "MANAGERS_SECONDS", LOOK_SECONDS)  # noqa: B010
    setattr(link, "_TIMEOUT", TIMEOUT_SECONDS)  # noqa: B010
    link.Link.call.__defaults__ = (None, TIMEOUT_SECONDS)
    setattr(command, "run", run_hurried)  # noqa: B010


if __name__ == "__main__":
    hurry()
    sys.exit(command.main())
