"""The cache agrees with the objects of the API, in any order of changes."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kubernetes.objects import claim
from tests.kubernetes.publishing import decoded, nvidia
from tests.kubernetes_e2e.nvidia import devices_at
from tests.tenants import ref

from slicewise.core.request import Request
from slicewise.journal.entries import NodePhase, QuotaRecord, TenantRef
from slicewise.kubernetes.allocations import DeviceId
from slicewise.kubernetes.api import ResourceClaim
from slicewise.kubernetes.cache import ClusterCache
from slicewise.kubernetes.devices.pool_reading import Library, PoolReading, read_pool
from slicewise.runtime.commit_loop import load

A100, DRIVER = "A100-80GB", "gpu.nvidia.com"


def reading(node: str, gpus: int = 2, model: str = A100) -> PoolReading:
    got = read_pool(decoded(nvidia(model, gpus, node)), Library())
    assert got.trouble is None
    return got


POOLS = {name: reading(name) for name in ("n1", "n2")}
FEWER = reading("n1", 1)
OTHER = reading("n1", 2, "H200-141GB")


def fresh() -> ClusterCache:
    return ClusterCache("default", lambda: 1000.0, lambda: "here")


def with_pools(*names: str) -> ClusterCache:
    cache = fresh()
    for name in names or ("n1", "n2"):
        cache.pools.set_open(name, True)
        cache.set_pool((DRIVER, name), POOLS[name], name)
    return cache


def at(profile: str, start: int, gpu: int = 0) -> str:
    return devices_at(A100, gpu, profile)[start]


def occupied(cache: ClusterCache) -> dict[str, str]:
    """By GPU: its slices, as text."""
    cluster = cache.state.cluster
    return {
        f"{node.name}/{index}": node.geometry.mask_text(cluster.state(gpu).mask)
        for node in cluster.nodes
        for index, gpu in enumerate(node.gpus)
    }


def phase(cache: ClusterCache, node: str) -> NodePhase:
    return cache.state.nodes[node].phase


def stands(cache: ClusterCache, uid: str) -> str:
    return cache.state.allocations[uid].state


def held(cache: ClusterCache) -> set[str]:
    cluster = cache.state.cluster
    return {
        f"{node.name}/{index}"
        for node in cluster.nodes
        for index, gpu in enumerate(node.gpus)
        if cluster.is_held(gpu)
    }


def test_allocations_of_any_allocator_take_their_slices() -> None:
    cache = with_pools()
    cache.update(claim("a", seats=[("n1", at("1g.10gb", 6)), ("n2", at("3g.40gb", 4, 1))]))
    assert occupied(cache)["n1/0"] == "00000010"
    assert occupied(cache)["n2/1"] == "00001111"
    cache.update(claim("a", seats=[("n1", at("4g.40gb", 0))], version=2))
    assert occupied(cache) == {
        "n1/0": "11110000", "n1/1": "00000000", "n2/0": "00000000", "n2/1": "00000000",
    }  # fmt: skip
    assert cache.state.tenants_by_name["team"].usage.memory_slices == 4
    cache.update(claim("a", version=3))
    assert cache.state.cluster.occupied_slices == 0


def test_conflicting_allocations_hold_the_gpu_until_one_ends() -> None:
    cache = with_pools("n1")
    cache.update(claim("a", seats=[("n1", at("4g.40gb", 0))]))
    cache.update(claim("b", seats=[("n1", at("1g.10gb", 0)), ("n1", at("1g.10gb", 0, 1))]))
    assert set(cache.clashes) == {"uid-b"}
    assert cache.clashes["uid-b"].against == {"uid-a"}
    assert cache.excluded("uid-a")
    assert cache.excluded("uid-b")
    assert cache.clashes["uid-b"].claim is cache.records["uid-b"].claim
    assert held(cache) == {"n1/0", "n1/1"}
    assert occupied(cache) == {"n1/0": "11110000", "n1/1": "00000000"}
    freed = cache.freed
    cache.forget("uid-a")
    assert not cache.clashes
    assert not cache.excluded("uid-b")
    assert not held(cache)
    assert cache.freed > freed
    assert occupied(cache) == {"n1/0": "10000000", "n1/1": "10000000"}


def test_a_changed_allocation_makes_room_for_a_conflicting_one() -> None:
    cache = with_pools("n1")
    cache.update(claim("a", seats=[("n1", at("4g.40gb", 0))]))
    cache.update(claim("b", seats=[("n1", at("1g.10gb", 0))]))
    cache.update(claim("a", seats=[("n1", at("3g.40gb", 4))], version=2))
    assert not cache.clashes
    assert occupied(cache)["n1/0"] == "10001111"


def test_assumed_devices_have_their_published_names() -> None:
    cache = with_pools("n1")
    got = cache.offers.place([Request("4g.40gb"), Request("3g.40gb")], lambda node: True)
    assert isinstance(got, tuple)
    made = claim("a")
    seats = cache.assume(made, got, {"pod": "p"})
    assert seats == (
        DeviceId(DRIVER, "n1", at("4g.40gb", 0)), DeviceId(DRIVER, "n1", at("3g.40gb", 4)),
    )  # fmt: skip
    given_ = claim("a", seats=[("n1", seat.device) for seat in seats], version=2)
    rows = cache.state.seq
    cache.update(given_)  # it comes back from the API
    assert cache.state.seq == rows
    assert cache.state.allocations["uid-a"].labels == {"claim": "a", "pod": "p"}


def test_a_withdrawn_pool_stays_while_its_devices_are_allocated() -> None:
    cache = with_pools("n1")
    cache.update(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    cache.pools.withdraw((DRIVER, "n1"))
    assert phase(cache, "n1") is NodePhase.CORDONED
    assert not isinstance(cache.offers.place([Request("1g.10gb")], lambda n: True), tuple)
    cache.set_pool((DRIVER, "n1"), POOLS["n1"], "n1")
    assert phase(cache, "n1") is NodePhase.READY
    cache.pools.withdraw((DRIVER, "n1"))
    cache.forget("uid-a")
    assert not cache.state.nodes


def test_a_changed_pool_keeps_its_claims() -> None:
    cache = with_pools("n1")
    cache.update(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    cache.update(claim("b", seats=[("n1", at("1g.10gb", 6, 1))]))
    cache.set_pool((DRIVER, "n1"), FEWER, "n1")
    assert occupied(cache) == {"n1/0": "00000010"}  # the other device is no longer known
    cache.set_pool((DRIVER, "n1"), OTHER, "n1")
    assert set(occupied(cache).values()) == {"00000000"}  # named otherwise on that model
    cache.set_pool((DRIVER, "n1"), POOLS["n1"], "n1")
    assert occupied(cache) == {"n1/0": "00000010", "n1/1": "00000010"}


def test_a_cordoned_node_offers_nothing() -> None:
    cache = with_pools("n1", "n2")
    cache.pools.set_open("n1", False)
    got = cache.offers.place([Request("1g.10gb")], lambda node: True)
    assert isinstance(got, tuple)
    assert cache.state.cluster.node_of(got[0].gpu).name == "n2"


def test_tainted_devices_hold_their_gpu() -> None:
    slices = nvidia(A100, 2, "n1")
    slices[1]["spec"]["devices"][3]["taints"] = [{"key": "broken", "effect": "NoSchedule"}]
    cache = fresh()
    cache.pools.set_open("n1", True)
    cache.set_pool((DRIVER, "n1"), read_pool(decoded(slices), Library()), "n1")
    assert held(cache) == {"n1/0"}
    cache.set_pool((DRIVER, "n1"), POOLS["n1"], "n1")
    assert not held(cache)


def test_two_drivers_of_one_node_are_two_nodes_of_the_cache() -> None:
    cache = with_pools("n1")
    cache.set_pool(("other.example.com", "n1"), OTHER, "n1")
    assert list(cache.state.nodes) == ["n1", "n1~2"]
    cache.pools.set_open("n1", False)
    assert {node.phase for node in cache.state.nodes.values()} == {NodePhase.CORDONED}


def test_namespaces_are_tenants_with_quotas() -> None:
    cache = with_pools("n1")
    cache.set_tenant(ref("team"), QuotaRecord(memory_slices=8))
    cache.update(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    cache.drop_tenant("team")
    assert "team" in cache.state.tenants_by_name  # its claim is still there
    cache.forget("uid-a")
    assert "team" not in cache.state.tenants_by_name


def test_a_recreated_namespace_stays_when_its_old_claims_end() -> None:
    cache = with_pools("n1")
    cache.update(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    cache.wait(claim("b"), [Request("1g.10gb")], 5, {"pod": "p"}, "capacity", "full")
    cache.drop_tenant("team")
    cache.forget("uid-a")
    assert "team" in cache.state.tenants_by_name  # a claim still waits
    cache.set_tenant(ref("team"), QuotaRecord(memory_slices=8))
    cache.stop_waiting("uid-b")
    assert "team" in cache.state.tenants_by_name


def test_a_namespace_that_is_created_again_is_another_tenant() -> None:
    cache = with_pools("n1")
    first, second = TenantRef("uid-1", "team"), TenantRef("uid-2", "team")
    cache.set_tenant(first, QuotaRecord())
    cache.update(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    cache.forget("uid-a")
    cache.set_tenant(second, QuotaRecord())  # the deletion was missed
    assert list(cache.state.tenants) == ["uid-2"]
    assert [row.seq for row in cache.journal.history(before=None, limit=9, tenant="uid-2")] == [
        cache.state.seq
    ]
    cache.drop_tenant("team")
    assert not cache.state.tenants
    cache.update(claim("b", seats=[("n1", at("1g.10gb", 6))]))
    assert [one.name for one in cache.state.tenants.values()] == ["team"]  # not seen yet


def test_waiting_claims_are_shown_and_served() -> None:
    cache = with_pools("n1")
    made = claim("a")
    cache.wait(made, [Request("1g.10gb")], 5, {"pod": "p"}, "capacity", "full")
    cache.wait(made, [Request("1g.10gb")], 5, {"pod": "p"}, "capacity", "full")
    assert len(cache.state.waiting) == 1
    assert stands(cache, "uid-a") == "queued"
    cache.update(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    assert stands(cache, "uid-a") == "placed"
    cache.wait(claim("b"), [Request("1g.10gb")], 0, {}, "capacity", "full")
    cache.stop_waiting("uid-b")
    assert len(cache.state.waiting) == 0


def test_a_reader_of_the_journal_sees_the_same_state() -> None:
    cache = ClusterCache("default", lambda: 1000.0, lambda: "here")
    cache.journal._keep = 5  # so that rows are dropped and replaced by a snapshot
    for name in ("n1", "n2"):
        cache.pools.set_open(name, True)
        cache.set_pool((DRIVER, name), POOLS[name], name)
    for number in range(20):
        cache.update(claim(f"c{number}", seats=[("n1", at("1g.10gb", number % 7))]))
        cache.forget(f"uid-c{number}")
    cache.update(claim("last", seats=[("n2", at("2g.20gb", 2))]))
    follower = fresh().state
    load(cache.journal, follower)
    assert follower.seq == cache.state.seq
    assert {k: v.parts for k, v in follower.allocations.items()} == {
        k: v.parts for k, v in cache.state.allocations.items()
    }


Deed = Callable[[ClusterCache], None]

PLACES = [
    at("1g.10gb", 0), at("1g.10gb", 6), at("4g.40gb", 0), at("3g.40gb", 4, 1), at("7g.80gb", 0, 1),
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 60))
def test_the_cache_depends_only_on_the_current_objects(seed: int, steps: int) -> None:
    """After random changes, a new cache of the remaining objects has the same state."""
    chance = random.Random(seed)
    cache = fresh()
    published: dict[str, PoolReading] = {}
    opened: set[str] = set()
    claims: dict[str, ResourceClaim] = {}

    def publish(into: ClusterCache, name: str) -> None:
        into.set_pool((DRIVER, name), published[name], name)

    for _ in range(steps):
        name = chance.choice(("n1", "n2"))
        match chance.randrange(5):
            case 0:
                published[name] = chance.choice(
                    [POOLS[name], FEWER if name == "n1" else POOLS["n2"]]
                )
                publish(cache, name)
            case 1:
                published.pop(name, None)
                cache.pools.withdraw((DRIVER, name))
            case 2:
                (opened.add if chance.random() < 0.7 else opened.discard)(name)
                cache.pools.set_open(name, name in opened)
            case _:
                key = f"c{chance.randrange(6)}"
                if chance.random() < 0.3:
                    claims.pop(key, None)
                    cache.forget(f"uid-{key}")
                else:
                    seats = [(name, one) for one in chance.sample(PLACES, chance.randrange(3))]
                    claims[key] = claim(key, seats=seats, version=chance.randrange(1000))
                    cache.update(claims[key])

    rebuilt = fresh()
    for name in sorted(opened):
        rebuilt.pools.set_open(name, True)
    for name in published:
        publish(rebuilt, name)
    # Of allocations that exclude each other the first keeps the slices, so use the same order.
    order = [*cache.state.allocations, *cache.clashes]
    for uid in order:
        rebuilt.update(claims[uid.removeprefix("uid-")])
    for one in claims.values():
        rebuilt.update(one)
    there = {gpu for gpu in occupied(cache) if gpu.split("/")[0] in published}
    assert {gpu: occupied(cache)[gpu] for gpu in there} == occupied(rebuilt)
    assert {gpu for gpu in held(cache) if gpu in there} == held(rebuilt)
    open_nodes = {name for name, node in cache.state.nodes.items() if node.phase is NodePhase.READY}
    assert open_nodes == {name for name in published if name in opened}


def test_a_changed_quota_counts_as_freed_devices() -> None:
    cache = with_pools("n1")
    cache.set_tenant(ref("team"), QuotaRecord(instances=1))
    freed = cache.freed
    cache.set_tenant(ref("team"), QuotaRecord(instances=1))
    assert cache.freed == freed
    cache.set_tenant(ref("team"), QuotaRecord(instances=2))
    assert cache.freed > freed


@pytest.mark.parametrize("admin", [False, True])
def test_administrative_access_takes_no_slices(admin: bool) -> None:
    cache = with_pools("n1")
    made = claim("a", seats=[("n1", at("7g.80gb", 0))])
    assert made.status.allocation is not None
    (result,) = made.status.allocation.devices.results
    result = msgspec.structs.replace(result, admin_access=admin)
    devices = msgspec.structs.replace(made.status.allocation.devices, results=(result,))
    allocation = msgspec.structs.replace(made.status.allocation, devices=devices)
    status = msgspec.structs.replace(made.status, allocation=allocation)
    cache.update(msgspec.structs.replace(made, status=status))
    assert cache.state.cluster.occupied_slices == (0 if admin else 8)


def test_a_claim_on_two_pools_takes_slices_of_both_in_any_order_of_publication() -> None:
    cache = with_pools("n1")
    cache.update(claim("a", seats=[("n1", at("1g.10gb", 6)), ("n2", at("2g.20gb", 0))]))
    assert cache.state.cluster.occupied_slices == 1
    cache.pools.set_open("n2", True)
    cache.set_pool((DRIVER, "n2"), POOLS["n2"], "n2")
    assert cache.state.cluster.occupied_slices == 3
    cache.forget("uid-a")
    assert cache.state.cluster.occupied_slices == 0
