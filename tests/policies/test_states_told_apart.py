"""States that tell instances apart change no decision of a policy that looks at slices only."""

from __future__ import annotations

import random
from functools import cache
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Catalog, Cluster, Geometry, Instance, Need, Request, Scheduler
from slicewise.core.states import StateSpace, state_space
from slicewise.core.tables import drop_tables
from slicewise.policies.registry import policy_names

MODELS = tuple(
    Catalog.builtin().find(name).require() for name in ("A100-80GB", "A30", "RTX-PRO-6000")
)
WANTS = [
    *(Request(profile.name) for model in MODELS for profile in model.profiles),
    Request(Need(2, 20)),
    Request(Need(1, 6)),
]
SLICES_ONLY = [name for name in policy_names() if name not in ("least-lost-time", "lease-aware")]


@cache
def mask_only(geometry: Geometry) -> StateSpace:
    """Return the states of a model without windows."""
    with patch("slicewise.core.states.MOST_WITH_WINDOWS", 0):
        drop_tables()
        space = state_space(geometry)
    drop_tables()
    assert len(space) < len(state_space(geometry))
    return space


def scheduler_of(policy: str, windows: bool) -> Scheduler:
    cluster = Cluster()
    with patch("slicewise.core.state_index.state_space", state_space if windows else mask_only):
        for number, (model, gpus) in enumerate([(0, 3), (1, 2), (2, 2), (0, 2)]):
            cluster.add_node(f"n{number}", MODELS[model], gpus)
    assert (cluster.state(0).windows is not None) == windows
    return Scheduler(cluster, policy)


def change(cluster: Cluster, rng: random.Random) -> None:
    """Hold, drain or reserve something."""
    gpu, node = rng.randrange(cluster.gpus), f"n{rng.randrange(4)}"
    placements = cluster.state(gpu).geometry.placements
    match rng.randrange(6):
        case 0:
            cluster.hold(gpu)
        case 1:
            cluster.drain(node)
        case 2 if cluster.reserved(gpu) is None:
            cluster.reserve(gpu, rng.randrange(len(placements)))
        case 3:
            cluster.unreserve(gpu)
        case 4:
            cluster.unhold(gpu)
        case _:
            cluster.resume(node)


@pytest.mark.unmeasured
@pytest.mark.parametrize("policy", SLICES_ONLY)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_every_decision_is_the_same(policy: str, seed: int) -> None:
    both = [scheduler_of(policy, windows) for windows in (True, False)]
    rng = random.Random(seed)
    active: list[Instance] = []
    for _ in range(120):
        if active and rng.random() < 0.35:
            gone = active.pop(rng.randrange(len(active)))
            for scheduler in both:
                scheduler.release(gone)
        if rng.random() < 0.1:
            drawn = rng.random()
            for scheduler in both:
                change(scheduler.cluster, random.Random(drawn))
        want = rng.choice(WANTS)
        made = [scheduler.submit(want) for scheduler in both]
        assert made[0] == made[1]
        assert both[0].turn == both[1].turn
        if isinstance(made[0], Instance):
            active.append(made[0])
