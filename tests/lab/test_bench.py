"""What the benchmark compares is the same work, and the work does not grow with the cluster.

No times here: counted states, counted changes of the index, and bytes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from slicewise import Cluster, Geometry, Instance, Scheduler, TablePolicy, policy, policy_names
from slicewise.core.idset import IdSet
from slicewise.lab import compiled_loops as loops
from slicewise.lab import kernel
from slicewise.lab.bench import PATHS, SettledCluster, SlotCounts, benchmark, deep_size
from slicewise.lab.mix import parse_mix
from slicewise.policies.lease_aware import LeaseAware

TABLE_POLICIES = [name for name in policy_names() if isinstance(policy(name), TablePolicy)]


def settled(a100: Geometry, gpus: int, name: str = "mfi", load: float = 0.85) -> SettledCluster:
    chosen = policy(name)
    assert isinstance(chosen, TablePolicy)
    return SettledCluster(parse_mix("uniform", a100), chosen, gpus, load)


@pytest.mark.parametrize("load", [0.85, 1.1])
def test_the_scans_decide_as_we_do(a100: Geometry, load: float) -> None:
    ours = settled(a100, 60, load=load)
    compiled, vectorised = ours.scan_run(), ours.scan_run()
    masks = np.array([state.mask for state in ours.models.states])
    for _ in range(40):
        arrivals = ours.draw(25)
        compiled.compiled(*arrivals[:2])
        vectorised.by_numpy(*arrivals[:2])
        ours.advance(arrivals)
        now = masks[ours.gpus.state_of]
        assert (compiled.masks == now).all()
        assert (vectorised.masks == now).all()


def test_the_engine_starts_from_the_same_cluster(a100: Geometry) -> None:
    ours = settled(a100, 50)
    cluster = Cluster.of(a100, 50)
    for _, gpu, placement in ours.instances():
        cluster.put(gpu, placement)
    assert cluster.occupied_slices == ours.gpus.totals[kernel.OCCUPIED]
    assert 0.7 < cluster.occupied_slices / cluster.slices < 1
    for gpu in range(50):
        assert cluster.state(gpu).mask == ours.models.states[ours.gpus.state_of[gpu]].mask


def test_a_settled_cluster_knows_every_end(a100: Geometry) -> None:
    """The engine continues with the same decisions, by time."""
    ours = settled(a100, 50, "lease-aware")
    assert isinstance(ours.policy, LeaseAware)
    cluster = Cluster.of(a100, 50)
    ending: dict[int, list[Instance]] = {}
    for slot, gpu, placement in ours.instances():
        instance = cluster.put(gpu, placement, slot)
        ending.setdefault(slot, []).append(instance)
    scheduler = Scheduler(cluster, ours.policy)
    slot, arrivals = ours.slot, ours.draw(200)
    compared = ours.advance(arrivals)
    assert 1 < compared <= ours.policy.most
    names = [profile.name for profile in ours.mix.profiles]
    for kind, lifetime in zip(arrivals.kinds.tolist(), arrivals.lifetimes.tolist(), strict=True):
        for gone in ending.pop(slot, ()):
            scheduler.release(gone)
        placed = scheduler.submit(names[kind], now=slot, ends=slot + lifetime)
        if isinstance(placed, Instance):
            ending.setdefault(slot + lifetime, []).append(placed)
        slot += 1
    for gpu in range(50):
        assert cluster.state(gpu).windows == ours.models.states[ours.gpus.state_of[gpu]].windows


def test_rows_of_the_benchmark(a100: Geometry) -> None:
    mix = parse_mix("uniform", a100)
    chosen = [policy("mfi"), policy("round-robin")]
    plan = SlotCounts(engine=70, compiled=700, scanned_gpus=7_000, vectorised_gpus=700)
    ticks: list[int] = []
    tables = [p for p in chosen if isinstance(p, TablePolicy)]
    decisions, memory = benchmark(mix, tables, [20, 40], 0.85, plan, ticks.append)
    assert sum(ticks) == 4
    assert Counter((r["path"], r["policy"]) for r in decisions) == {
        **{(path, "mfi"): 2 for path in PATHS},
        ("engine", "round-robin"): 2,
        ("compiled", "round-robin"): 2,
    }
    for row in decisions:
        assert set(row) == {
            "path",
            "policy",
            "gpus",
            "load",
            "ns_per_decision",
            "states_examined_mean",
        }
        assert isinstance(row["ns_per_decision"], float)
        assert row["ns_per_decision"] > 0
    assert [row["gpus"] for row in memory] == [20, 20, 40, 40]


@pytest.mark.parametrize("name", TABLE_POLICIES)
def test_the_states_examined_do_not_grow_with_the_cluster(a100: Geometry, name: str) -> None:
    few, many = settled(a100, 100, name), settled(a100, 30_000, name)
    bound = len(few.models.states) + kernel.LOOK_AHEAD
    for cluster in (few, many):
        trace = np.zeros((5000, 5), np.int32)
        arrivals = cluster.draw(5000)
        loops.advance(
            cluster.tables, cluster.gpus, cluster.departures, *arrivals[:2], cluster.slot, trace
        )
        assert trace[:, 1].max() <= bound


@pytest.mark.parametrize("gpus", [100, 20_000])
def test_index_changes_do_not_grow_with_the_cluster(
    a100: Geometry, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    for number in range(gpus // 4):
        cluster.add_node(f"n{number}", a100, 4)
    scheduler = Scheduler(cluster, "mfi")
    scheduler.submit("1g.10gb")
    changes = Counter[str]()

    def count(name: str) -> None:
        method: Any = getattr(IdSet, name)

        def counted(self: IdSet, member: int) -> Any:
            changes[name] += 1
            return method(self, member)

        monkeypatch.setattr(IdSet, name, counted)

    for name in ("add", "remove", "next"):
        count(name)

    def changed_by(action: Any, *arguments: object) -> dict[str, int]:
        changes.clear()
        action(*arguments)
        return dict(changes)

    assert changed_by(scheduler.submit, "3g.40gb") == {"add": 1, "remove": 1}
    instance = scheduler.submit("2g.20gb")
    assert isinstance(instance, Instance)
    assert changed_by(scheduler.release, instance) == {"add": 1, "remove": 1}
    # A node's four GPUs leave or join their state and the set of all schedulable ones.
    assert changed_by(cluster.drain, "n7") == {"remove": 8}
    assert changed_by(cluster.resume, "n7") == {"add": 8}
    assert changed_by(cluster.remove_node, "n7") == {"remove": 8}
    assert changed_by(cluster.add_node, "n7", a100, 4) == {"add": 8}


def test_memory_per_gpu_is_small(a100: Geometry) -> None:
    def size(gpus: int) -> int:
        ours = settled(a100, gpus)
        cluster = Cluster.of(a100, gpus)
        for _, gpu, placement in ours.instances():
            cluster.put(gpu, placement)
        return deep_size(cluster)

    small, large = size(20_000), size(60_000)
    assert (large - small) / 40_000 < 150, "bytes for one more GPU and the instances on it"
