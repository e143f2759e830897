"""Whatever the order in which things happen: nothing breaks, nothing is lost, nothing is left over.

See `simulation` for what is played. Each seed gives a story, the same one every time. One that
fails is shortened as long as it fails alike, and then told. SLICEWISE_K8S_ORDERS says how many
stories are played, SLICEWISE_K8S_SEED which is the first.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest
from tests.k8s_units.simulation import Simulation

ORDERS = int(os.environ.get("SLICEWISE_K8S_ORDERS", "200"))
SEED = int(os.environ.get("SLICEWISE_K8S_SEED", "0"))
LONGEST = 1500
PATIENCE = 120.0
"""How many seconds are spent on shortening a story that fails."""


def story(seed: int) -> bytes:
    chance = random.Random(seed)
    return chance.randbytes(chance.randrange(50, LONGEST))


def failure(choices: bytes) -> str:
    """What goes wrong in a story, if anything: the kind of mistake and where it is made."""
    try:
        Simulation(choices).run()
    except Exception as mistake:
        trace = mistake.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}"
        return f"{type(mistake).__name__} in {where}"
    return ""


def shorter(choices: bytes) -> Iterator[bytes]:
    """The same story without some part of it, large parts first."""
    size = len(choices) // 2
    while size:
        for begin in range(0, len(choices), size):
            yield choices[:begin] + choices[begin + size :]
        size //= 2


def shortest(choices: bytes) -> bytes:
    """A story that fails in the same way, and from which nothing can be left out."""
    alike, until = failure(choices), time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = next((one for one in shorter(choices) if failure(one) == alike), None)
        if found is None:
            break
        choices = found
    return choices


@pytest.mark.unmeasured
def test_in_any_order() -> None:
    for seed in range(SEED, SEED + ORDERS):
        if failure(story(seed)):
            choices, told = shortest(story(seed)), list[str]()
            try:
                Simulation(choices, told.append).run()
            finally:
                print(f"the story of seed {seed}, in short: {choices.hex()}", *told, sep="\n")
            pytest.fail("it depends on more than the choices")


def test_a_story_is_the_same_each_time_it_is_played() -> None:
    played: list[list[str]] = [[], []]
    for told in played:
        Simulation(story(SEED), told.append).run()
    assert len(played[0]) > 100
    assert played[0] == played[1]


def test_a_story_is_shortened_to_what_is_needed() -> None:
    def fails(choices: bytes) -> bool:
        return 7 in choices and 9 in choices

    choices = bytes(range(100))
    while found := next((one for one in shorter(choices) if fails(one)), b""):
        choices = found
    assert choices == bytes([7, 9])
