"""Totals of the cluster are exact; an illegal change is refused and has no effect."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import (
    Catalog,
    Cluster,
    Geometry,
    Instance,
    PlacementError,
    Profile,
    Reading,
    SlicewiseError,
    UnknownNameError,
    score,
)
from slicewise.core.idset import NONE


def check_totals(
    cluster: Cluster, active: dict[int, Instance], held: Collection[int] = frozenset()
) -> None:
    """Recompute everything the cluster stores from the instances alone."""
    masks = {gpu: 0 for node in cluster.nodes for gpu in node.gpus}
    for instance in active.values():
        geometry = cluster.node_of(instance.gpu).geometry
        window = geometry.profile(instance.profile).window(instance.start)
        assert not masks[instance.gpu] & window, "instances overlap"
        masks[instance.gpu] |= window
    geometries = {gpu: cluster.node_of(gpu).geometry for gpu in masks}
    assert cluster.gpus == len(masks)
    assert cluster.slices == sum(g.slices for g in geometries.values())
    assert cluster.occupied_slices == sum(m.bit_count() for m in masks.values())
    assert cluster.free_slices == cluster.slices - cluster.occupied_slices
    assert cluster.active_gpus == sum(m != 0 for m in masks.values())
    assert cluster.instance_count == len(active)
    assert {i.id: i for i in cluster.instances()} == active
    for reading in Reading:
        total = sum(score(geometries[g], m, reading) for g, m in masks.items())
        assert cluster.fragmentation(reading) == pytest.approx(total / max(1, len(masks)))
    for gpu, mask in masks.items():
        assert cluster.state(gpu).mask == mask
        here = sorted(instance for instance in active.values() if instance.gpu == gpu)
        assert cluster.instances_on(gpu) == here
    schedulable = {
        gpu for node in cluster.nodes if node.schedulable for gpu in node.gpus if gpu not in held
    }
    assert {gpu for gpu in masks if cluster.is_held(gpu)} == held
    assert set(cluster.schedulable) == schedulable
    members = [set(m) for m in cluster.members]
    assert set().union(*members) == schedulable
    assert sum(map(len, members)) == len(schedulable)
    for state, ids in enumerate(members):
        assert cluster.first[state] == min(ids, default=NONE)
        assert all(cluster.state_of[gpu] == state for gpu in ids)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_totals_are_exact_after_random_changes(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    models = [Catalog.builtin().find(n).require() for n in ("A100-80GB", "A30", "RTX-PRO-6000")]
    cluster = Cluster()
    active: dict[int, Instance] = {}
    held: set[int] = set()
    for step in range(steps):
        match rng.randrange(11):
            case 0:
                cluster.add_node(f"n{step}", rng.choice(models), rng.randint(1, 3))
            case 1 if cluster.nodes:
                cluster.drain(rng.choice(cluster.nodes).name)
            case 2 if cluster.nodes:
                cluster.resume(rng.choice(cluster.nodes).name)
            case 3 if cluster.nodes:
                node = rng.choice(cluster.nodes)
                if any(i.gpu in node.gpus for i in active.values()):
                    with pytest.raises(PlacementError, match="still has instances"):
                        cluster.remove_node(node.name)
                else:
                    cluster.remove_node(node.name)
                    held -= set(node.gpus)
            case 9 if cluster.nodes:
                gpu = rng.choice(rng.choice(cluster.nodes).gpus)
                cluster.hold(gpu)
                held.add(gpu)
            case 10 if cluster.nodes:
                gpu = rng.choice(rng.choice(cluster.nodes).gpus)
                cluster.unhold(gpu)
                held.discard(gpu)
            case 4 | 5 if active:
                identity = rng.choice(list(active))
                gone = active.pop(identity)
                assert cluster.release(identity) == gone
                with pytest.raises(PlacementError, match="released already"):
                    cluster.release(gone)
            case _ if cluster.nodes:
                node = rng.choice(cluster.nodes)
                placement = rng.choice(node.geometry.placements)
                gpu = rng.choice(node.gpus)
                feasible = cluster.state(gpu).feasible_starts(placement.profile)
                if node.schedulable and gpu not in held and placement.start in feasible:
                    made = cluster.place(gpu, placement.profile.name, placement.start)
                    assert made.id not in active
                    active[made.id] = made
                else:
                    with pytest.raises(PlacementError):
                        cluster.place(gpu, placement.profile.name, placement.start)
    check_totals(cluster, active, held)


def test_refusals_have_a_reason(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    cluster.place(0, "2g.20gb", 2)
    with pytest.raises(PlacementError, match=r"overlaps occupied slices \(00110000"):
        cluster.place(0, "1g.10gb", 3)
    with pytest.raises(PlacementError, match=r"cannot start at slice 1 .* legal: 0, 2, 4"):
        cluster.place(0, "2g.20gb", 1)
    with pytest.raises(UnknownNameError, match=r"9g\.90gb"):
        cluster.place(0, "9g.90gb", 0)
    for gpu in (-1, 2):
        with pytest.raises(PlacementError, match="no GPU"):
            cluster.place(gpu, "1g.10gb", 0)
        with pytest.raises(PlacementError, match="no GPU"):
            cluster.instances_on(gpu)
    cluster.place(0, "1g.10gb+me", 0)
    with pytest.raises(PlacementError, match="media-extension budget \\(1 of 1 used\\)"):
        cluster.place(0, "1g.10gb+me", 1)
    cluster.drain("node-0")
    with pytest.raises(PlacementError, match="drained"):
        cluster.place(1, "1g.10gb", 0)


def test_a_held_gpu_takes_no_new_instances(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 2)
    kept = cluster.place(0, "1g.10gb", 0)
    for _ in range(2):
        cluster.hold(0)
    check_totals(cluster, {kept.id: kept}, {0})
    with pytest.raises(PlacementError, match="GPU 0 of node 'node-0' is held"):
        cluster.place(0, "1g.10gb", 1)
    assert cluster.place(1, "1g.10gb", 0).gpu == 1
    cluster.drain("node-0")
    cluster.unhold(0)
    cluster.hold(1)
    cluster.resume("node-0")
    assert list(cluster.schedulable) == [0], "a drained node's GPU can be held and released"
    for _ in range(2):
        cluster.unhold(1)
    assert list(cluster.schedulable) == [0, 1]
    for gpu in (-1, 2):
        for call in (cluster.hold, cluster.unhold, cluster.is_held):
            with pytest.raises(PlacementError, match="no GPU"):
                call(gpu)


def test_the_compute_budget_limits_where_windows_do_not() -> None:
    greedy = Geometry("greedy", 4, 2, (Profile("1g", 1, 1, 1, (0, 1, 2, 3)),))
    cluster = Cluster.of(greedy, 1)
    cluster.place(0, "1g", 0)
    cluster.place(0, "1g", 1)
    with pytest.raises(PlacementError, match=r"compute budget \(2 of 2 used\)"):
        cluster.place(0, "1g", 2)


def test_ids_are_never_reused(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 1)
    first = cluster.place(0, "1g.10gb", 0)
    cluster.release(first)
    second = cluster.place(0, "1g.10gb", 0)
    assert second.id != first.id
    for stale in (first.id, -1, 1 << 70, second.id + 1):
        with pytest.raises(PlacementError, match="no instance"):
            cluster.release(stale)
    assert cluster.instance(second.id) == second


def test_undo_restores_the_cluster(a100: Geometry) -> None:
    cluster = Cluster.of(a100, 1)
    kept = cluster.place(0, "3g.40gb", 4)
    made = cluster.place(0, "1g.10gb", 0)
    cluster.undo_place(made)
    check_totals(cluster, {kept.id: kept})
    assert cluster.place(0, "1g.10gb", 0) == made, "the id is given again, as if for the first time"
    gone = cluster.release(kept)
    cluster.undo_release(gone)
    check_totals(cluster, {kept.id: kept, made.id: made})
    assert cluster.instance(kept.id) == kept
    with pytest.raises(PlacementError, match="not the latest"):
        cluster.undo_release(gone)
    cluster.release(kept)
    cluster.release(made)
    with pytest.raises(PlacementError, match="not the latest"):
        cluster.undo_release(kept)


def test_gpus_are_split_over_nodes(a100: Geometry) -> None:
    def nodes(*sizes: int) -> list[tuple[str, range]]:
        return [(node.name, node.gpus) for node in Cluster.of(a100, *sizes).nodes]

    assert nodes(3) == nodes(3, 3) == nodes(3, 8) == [("node-0", range(3))]
    assert nodes(5, 2) == [
        ("node-0", range(2)),
        ("node-1", range(2, 4)),
        ("node-2", range(4, 5)),
    ]
    for sizes in ((0,), (0, 8), (-1, 1), (4, 0)):
        with pytest.raises(SlicewiseError, match="at least one GPU, not"):
            Cluster.of(a100, *sizes)


def test_nodes_by_name(a100: Geometry) -> None:
    cluster = Cluster()
    assert cluster.fragmentation() == 0
    cluster.add_node("a", a100, 2)
    node = cluster.add_node("b", a100, 3)
    assert cluster.node_of(3) == node
    assert cluster.models == (a100,)
    with pytest.raises(SlicewiseError, match="already exists"):
        cluster.add_node("a", a100, 1)
    with pytest.raises(SlicewiseError, match="at least one GPU"):
        cluster.add_node("c", a100, 0)
    with pytest.raises(UnknownNameError, match="unknown node 'z'"):
        cluster.node("z")
    twin = Geometry(a100.model, 8, 7, a100.profiles, 80, a100.budgets)
    with pytest.raises(SlicewiseError, match="another geometry named"):
        cluster.add_node("d", twin, 1)


def test_gpu_ids_of_removed_nodes_are_reused(a100: Geometry) -> None:
    cluster = Cluster()
    cluster.add_node("a", a100, 2)
    cluster.add_node("b", a100, 2)
    cluster.remove_node("a")
    with pytest.raises(PlacementError, match="no GPU 0"):
        cluster.state(0)
    assert cluster.spare_gpus == (range(2),)
    assert (cluster.next_gpus(2), cluster.next_gpus(3)) == (0, 4)
    assert cluster.add_node("c", a100, 2).gpus == range(2)
    assert cluster.add_node("d", a100, 2).gpus == range(4, 6)


def test_forgetting_a_model_restores_the_cluster() -> None:
    catalog = Catalog.builtin()
    first, gone, last = (catalog.find(n).require() for n in ("A100-80GB", "A30-24GB", "H100-80GB"))

    def made(*models: Geometry) -> Cluster:
        cluster = Cluster()
        for geometry in models:
            cluster.add_node(geometry.model, geometry, 2)
        return cluster

    cluster, plain = made(first, gone, last), made(first, last)
    with pytest.raises(SlicewiseError, match="in use"):
        cluster.forget(gone)
    placed = [cluster.place(cluster.node(g.model).gpus[0], "7g.80gb", 0) for g in (first, last)]
    seen = cluster.models_seen
    cluster.remove_node(gone.model)
    cluster.forget(gone)
    assert cluster.models_seen > seen
    with pytest.raises(SlicewiseError, match="not known"):
        cluster.forget(gone)
    check_totals(cluster, {instance.id: instance for instance in placed})
    assert cluster.models == plain.models
    assert cluster.states == plain.states
    assert cluster.after_place == plain.after_place
    assert cluster.after_release == plain.after_release
    assert len(cluster.members) == len(cluster.first) == len(cluster.states)
    for instance in placed:
        cluster.release(instance)
    cluster.remove_node(last.model)
    cluster.forget(last)  # the last one: no numbers shift
    assert cluster.states == made(first).states
    node = cluster.add_node("again", gone, 2)
    assert cluster.state(node.gpus[0]).geometry == gone
    check_totals(cluster, {})
