"""No policy places on a held GPU, whatever its node and its state."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Catalog, Cluster, Instance, Rejection, Request, Scheduler
from slicewise.core.geometry import Geometry
from slicewise.policies.reference import Decision, ReferenceGpu, ReferenceScheduler
from slicewise.policies.registry import policy_names

MODELS = tuple(Catalog.builtin().find(name).require() for name in ("A100-80GB", "A30"))
REFERENCED = tuple(name for name in policy_names() if not name.startswith("peer-"))


def _random_changes(seed: int, name: str) -> None:
    rng = random.Random(seed)
    cluster = Cluster()
    geometries: list[Geometry] = []
    for number, (model, gpus) in enumerate([(0, 2), (1, 2), (0, 1)]):
        cluster.add_node(f"n{number}", MODELS[model], gpus)
        geometries += [MODELS[model]] * gpus
    scheduler = Scheduler(cluster, name)
    reference = None
    if name in REFERENCED:
        reference = ReferenceScheduler([ReferenceGpu(one) for one in geometries], name)
    living: list[tuple[Instance, Decision]] = []
    profiles = [profile.name for model in MODELS for profile in model.profiles]
    for _ in range(80):
        gpu = rng.randrange(len(geometries))
        (cluster.hold if rng.random() < 0.5 else cluster.unhold)(gpu)
        (cluster.drain if rng.random() < 0.3 else cluster.resume)(f"n{rng.randrange(3)}")
        if living and rng.random() < 0.4:
            instance, decision = living.pop(rng.randrange(len(living)))
            scheduler.release(instance)
            if reference is not None:
                reference.release(decision)
        request = Request(rng.choice(profiles))
        made = scheduler.submit(request)
        if isinstance(made, Instance):
            assert not cluster.is_held(made.gpu)
            assert cluster.node_of(made.gpu).schedulable
            living.append((made, Decision(made.gpu, made.profile, made.start)))
        if reference is not None:
            for number, twin in enumerate(reference.gpus):
                twin.schedulable = number in cluster.schedulable
            expected = reference.submit(request)
            got = made.reason if isinstance(made, Rejection) else living[-1][1]
            assert got == expected


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", policy_names())
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=10, deadline=None)
def test_no_policy_places_on_a_held_gpu(name: str, seed: int) -> None:
    _random_changes(seed, name)
