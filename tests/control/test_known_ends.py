"""Leases and expected durations as ends of instances, by which placements are chosen."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from tests.control.control_plane import ControlPlane

from slicewise.control.commands import CarryOut, Extend, MoveInstance
from slicewise.control.snapshot import (
    decode_snapshot,
    encode_snapshot,
    restore_snapshot,
    snapshot_of,
)
from slicewise.control.state import State


def ends(state: State) -> dict[str, float]:
    """The end of the first instance of each allocation."""
    return {one: state.cluster.end_of(ids[0]) for one, ids in state.instances.items()}


def scene(policy: str = "default", gpus: int = 2) -> ControlPlane:
    """A cluster and a tenant."""
    plane = ControlPlane(policy)
    plane.node(gpus=gpus)
    plane.tenant()
    return plane


@pytest.mark.parametrize(
    ("lease", "expected", "stays"),
    [(None, None, math.inf), (50, None, 50), (None, 30, 30), (50, 30, 30), (50, 70, 50)],
)
def test_the_end_of_an_instance_is_what_its_request_says(
    lease: float | None, expected: float | None, stays: float
) -> None:
    plane = scene()
    placed = plane.create("1g.10gb", lease=lease, expected_seconds=expected)[1]["id"]
    assert ends(plane.state) == {placed: plane.now + stays}


def test_a_queued_request_has_its_end_from_when_it_is_placed() -> None:
    plane = scene(gpus=1)
    first = plane.create("7g.80gb")[1]["id"]
    second = plane.create("7g.80gb", wait=100, expected_seconds=40)[1]["id"]
    plane.wait(60)
    plane.release(first)
    assert ends(plane.state) == {second: plane.now + 40}


def test_an_extended_lease_is_the_end_and_the_hint_is_given_up() -> None:
    plane = scene()
    one = plane.create("1g.10gb", lease=50, expected_seconds=20)[1]["id"]
    plane.now += 15
    assert plane.ask(Extend(one, 100))[0] == 200
    assert ends(plane.state) == {one: plane.now + 100}


def test_a_moved_instance_keeps_its_end() -> None:
    plane = scene()
    one = plane.create("1g.10gb", lease=50)[1]["id"]
    before = ends(plane.state)
    part = plane.state.allocations[one].parts[0]
    move = MoveInstance(one, 0, "n0", part.gpu, part.start, "n0", 1 - part.gpu, part.start)
    plane.now += 5
    assert plane.ask(CarryOut((move,)))[0] == 200
    assert ends(plane.state) == before


@pytest.mark.parametrize("seed", range(4))
def test_ends_decide_and_a_replay_knows_them(seed: int) -> None:
    """Under `lease-aware`, a state restored from a snapshot decides as the one it was taken of."""
    rng = random.Random(seed)
    plane = scene("lease-aware", gpus=4)
    twin: ControlPlane | None = None
    for step in range(220):
        profile = rng.choice(["1g.10gb", "2g.20gb", "3g.40gb", "1g.20gb"])
        terms: dict[str, Any] = {
            "lease": rng.choice([None, 4.0, 30.5]),
            "expected_seconds": rng.choice([None, None, 7]),
            "wait": rng.choice([0, 5]),
        }
        living = sorted(plane.state.instances)
        gone = rng.choice(living) if living and rng.random() < 0.4 else None
        longer = rng.choice(living) if living and rng.random() < 0.1 else None
        for each in (plane, twin):
            if each is None:
                continue
            each.create(profile, **terms)
            if longer is not None:
                each.ask(Extend(longer, 12))
            if gone is not None:
                each.release(gone)
            each.wait(0.5)
        if step == 60:
            data = encode_snapshot(snapshot_of(plane.state))
            state = restore_snapshot(decode_snapshot(data), State("lease-aware"))
            assert ends(state) == ends(plane.state)
            twin = ControlPlane("lease-aware", state=state, first_id=plane.used_ids)
            twin.now, twin.actor = plane.now, plane.actor
    assert twin is not None
    later = [row for row in plane.rows if row.seq > twin.rows[0].seq - 1]
    assert [row.entry for row in later] == [row.entry for row in twin.rows]
    assert ends(twin.state) == ends(plane.state)
