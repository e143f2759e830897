"""Engine, compiled kernel and plain reference make the same decisions.

Streams mix arrivals by name and by need, releases, drains and resumes over several GPU models.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import (
    Catalog,
    Cluster,
    Geometry,
    Instance,
    Need,
    Rejection,
    Request,
    Scheduler,
    TablePolicy,
    policy,
    policy_names,
)
from slicewise.lab import kernel
from slicewise.lab.packed_tables import Models, compile_tables
from slicewise.policies.reference import Decision, ReferenceGpu, ReferenceScheduler

# The reference does not know the rules of other systems: tests/policies/test_peers.py has their
# twins, and test_experiments.py compares their compiled form with the engine.
BUILTIN = [
    name
    for name in policy_names()
    if isinstance(policy(name), TablePolicy) and not name.startswith("peer-")
]


def load(*names: str) -> list[Geometry]:
    return [Catalog.builtin().find(name).require() for name in names]


@cache
def tables_of(
    name: str, geometries: tuple[Geometry, ...], wants: tuple[Request, ...]
) -> tuple[Models, kernel.Tables]:
    """Constant data, created once for all streams that share it."""
    chosen, models = policy(name), Models(geometries, wants)
    assert isinstance(chosen, TablePolicy)
    return models, compile_tables(models, chosen)


class Trio:
    """The same cluster three times, fed the same stream."""

    def __init__(self, name: str, nodes: list[tuple[Geometry, int]], wants: list[Request]) -> None:
        self.wants = wants
        cluster = Cluster()
        gpus: list[ReferenceGpu] = []
        geometries = list(dict.fromkeys(geometry for geometry, _ in nodes))
        models, self.tables = tables_of(name, tuple(geometries), tuple(wants))
        empty: list[int] = []
        self.nodes: list[range] = []
        for number, (geometry, count) in enumerate(nodes):
            self.nodes.append(cluster.add_node(f"n{number}", geometry, count).gpus)
            gpus += [ReferenceGpu(geometry) for _ in range(count)]
            empty += [models.empty_state[geometries.index(geometry)]] * count
        self.engine = Scheduler(cluster, name)
        self.reference = ReferenceScheduler(gpus, name)
        self.gpus = kernel.new_gpus(np.array(empty, np.int64), len(models.states))
        self.living: list[tuple[Instance, Decision, int]] = []

    def arrive(self, kind: int) -> None:
        request = self.wants[kind]
        ours = self.engine.submit(request)
        theirs = self.reference.submit(request)
        gpu, placement, looked = kernel.submit(self.tables, self.gpus, kind)
        assert looked <= len(self.gpus.first) + kernel.LOOK_AHEAD
        if isinstance(ours, Rejection):
            assert theirs == ours.reason
            assert placement == kernel.LEFT_OUT
            return
        assert theirs == Decision(ours.gpu, ours.profile, ours.start)
        geometry = self.engine.cluster.node_of(gpu).geometry
        made = geometry.placements[placement]
        assert (gpu, made.profile.name, made.start) == theirs
        self.living.append((ours, theirs, placement))

    def release(self, which: int) -> None:
        if self.living:
            ours, theirs, placement = self.living.pop(which % len(self.living))
            self.engine.release(ours)
            self.reference.release(theirs)
            kernel.release(self.tables, self.gpus, ours.gpu, placement)

    def set_node(self, which: int, schedulable: bool) -> None:
        which %= len(self.nodes)
        cluster = self.engine.cluster
        (cluster.resume if schedulable else cluster.drain)(f"n{which}")
        for gpu in self.nodes[which]:
            self.reference.gpus[gpu].schedulable = schedulable
            kernel.set_schedulable(self.gpus, gpu, schedulable)

    def check_totals(self) -> None:
        cluster = self.engine.cluster
        totals = self.gpus.totals
        assert totals[kernel.OCCUPIED] == cluster.occupied_slices
        assert totals[kernel.ACTIVE] == cluster.active_gpus
        assert totals[kernel.FRAGMENTATION] / cluster.gpus == cluster.fragmentation()

    def walk(self, steps: list[tuple[int, int]]) -> None:
        for action, argument in steps:
            if action < 6:
                self.arrive(argument % len(self.wants))
            elif action < 9:
                self.release(argument)
            else:
                self.set_node(argument // 2, bool(argument % 2))
        self.check_totals()


STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1000)), max_size=120)


@pytest.mark.parametrize("name", BUILTIN)
@settings(max_examples=25, deadline=None)
@given(steps=STEPS, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_on_one_model(name: str, steps: list[tuple[int, int]], sizes: list[int]) -> None:
    (a100,) = load("A100-80GB")
    wants = [Request(profile.name) for profile in a100.profiles]
    Trio(name, [(a100, size) for size in sizes], wants).walk(steps)


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", BUILTIN)
@settings(max_examples=25, deadline=None)
@given(steps=STEPS, order=st.permutations(range(4)))
def test_on_mixed_models_and_needs(
    name: str, steps: list[tuple[int, int]], order: list[int]
) -> None:
    models = load("A100-80GB", "A100-40GB", "A30", "RTX-PRO-6000")
    wants = [
        Request("1g.10gb"),
        Request("3g.40gb"),
        Request("4g.24gb"),
        Request("1g.24gb+me"),
        Request("no.such"),
        Request(Need(2, 20)),
        Request(Need(1, 6)),
        Request(Need(3, 20), ("A100-40GB", "A100-80GB")),
        Request(Need(8, 0)),
    ]
    Trio(name, [(models[i], 2) for i in order], wants).walk(steps)


@pytest.mark.parametrize("name", BUILTIN)
def test_on_a_long_stream(name: str) -> None:
    rng = random.Random(7)
    a100, h100 = load("A100-80GB", "H100-80GB")
    wants = [*(Request(profile.name) for profile in a100.plain_profiles), Request("no.such")]
    trio = Trio(name, [(a100, 20), (h100, 10), (a100, 5)], wants)
    trio.walk(
        [
            (rng.choices(range(10), [5] * 6 + [9] * 3 + [1])[0], rng.randrange(10**6))
            for _ in range(1500)
        ]
    )


@pytest.mark.parametrize("name", ["round-robin", "round-robin-strict"])
def test_round_robin_continues_beyond_the_look_ahead(name: str) -> None:
    """With more full GPUs in a row than the look-ahead examines, the index is used."""
    (a100,) = load("A100-80GB")
    wants = [Request("7g.80gb"), Request("1g.10gb")]
    trio = Trio(name, [(a100, 80)], wants)
    for _ in range(80):
        trio.arrive(0)
    for which in (70, 5):
        trio.release(which)
    for _ in range(20):
        trio.arrive(1)
        trio.arrive(0)
    trio.check_totals()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 4096, 4097, 300_000])
def test_the_compiled_index_finds_the_lowest_at_any_size(count: int) -> None:
    (a100,) = load("A100-80GB")
    models = Models([a100], [Request("7g.80gb")])
    chosen = policy("first-fit")
    assert isinstance(chosen, TablePolicy)
    tables = compile_tables(models, chosen)
    gpus = kernel.new_gpus(np.zeros(count, np.int64), len(models.states))
    keep = {count // 2, count - 1, 0}
    for gpu in range(count):
        if gpu not in keep:
            kernel.set_schedulable(gpus, gpu, False)
    found = []
    while (decision := kernel.submit(tables, gpus, 0))[0] != kernel.NONE:
        found.append(decision[0])
    assert found == sorted(keep)
