"""The controller against random orders of events, writes, faults and restarts.

`simulation` plays a story: a byte string selects every step. Hypothesis generates the stories and
shrinks one that fails; its steps are then printed. The examples are the same in every run, unless
SLICEWISE_K8S_ORDERS sets how many random ones to play.
"""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from tests.kubernetes.simulation import Simulation

ORDERS = os.environ.get("SLICEWISE_K8S_ORDERS")
EXAMPLES = 200
_BLOCK = 16
"""Stories consist of blocks of this many choices, which Hypothesis can remove one by one."""


@pytest.fixture(autouse=True)
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    """The log of all examples would hide the story of the one that fails."""
    caplog.set_level(logging.CRITICAL, "slicewise.kubernetes")


@st.composite
def stories(draw: st.DrawFn) -> bytes:
    """A story of 64 to 1536 choices, uniform in length."""
    blocks = draw(st.integers(4, 96))
    return b"".join(draw(st.binary(min_size=_BLOCK, max_size=_BLOCK)) for _ in range(blocks))


@settings(
    max_examples=int(ORDERS or EXAMPLES),
    derandomize=ORDERS is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(stories())
def test_any_order(choices: bytes) -> None:
    told: list[str] = []
    try:
        Simulation(choices, told.append).run()
    finally:
        note("\n".join(told))


def test_a_story_is_the_same_each_time_it_is_played() -> None:
    choices = bytes((37 * number + number * number // 5) % 256 for number in range(1000))
    played: list[list[str]] = [[], []]
    for told in played:
        Simulation(choices, told.append).run()
    assert len(played[0]) > 100
    assert played[0] == played[1]
