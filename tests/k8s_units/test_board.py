"""The board agrees with what the API says, in whatever order it is heard."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.k8s.nvidia import devices_at
from tests.k8s_units.objects import claim
from tests.k8s_units.publishing import decoded, nvidia

from slicewise.control.entries import NodePhase, QuotaRecord
from slicewise.control.writer import load
from slicewise.core.request import Request
from slicewise.k8s.api import ResourceClaim
from slicewise.k8s.board import Board, Seat
from slicewise.k8s.devices import Library, PoolReading, read_pool

A100, DRIVER = "A100-80GB", "gpu.nvidia.com"


def reading(node: str, gpus: int = 2, model: str = A100) -> PoolReading:
    got = read_pool(decoded(nvidia(model, gpus, node)), Library())
    assert got.trouble is None
    return got


POOLS = {name: reading(name) for name in ("n1", "n2")}
FEWER = reading("n1", 1)
OTHER = reading("n1", 2, "H200-141GB")


def fresh() -> Board:
    return Board("default", lambda: 1000.0, lambda: "here")


def with_pools(*names: str) -> Board:
    board = fresh()
    for name in names or ("n1", "n2"):
        board.pools.set_open(name, True)
        board.set_pool((DRIVER, name), POOLS[name], name)
    return board


def at(profile: str, start: int, gpu: int = 0) -> str:
    return devices_at(A100, gpu, profile)[start]


def occupied(board: Board) -> dict[str, str]:
    """By GPU: its slices, as one sees them."""
    cluster = board.state.cluster
    return {
        f"{node.name}/{index}": node.geometry.mask_text(cluster.state(gpu).mask)
        for node in cluster.nodes
        for index, gpu in enumerate(node.gpus)
    }


def phase(board: Board, node: str) -> NodePhase:
    return board.state.nodes[node].phase


def stands(board: Board, uid: str) -> str:
    return board.state.allocations[uid].state


def held(board: Board) -> set[str]:
    cluster = board.state.cluster
    return {
        f"{node.name}/{index}"
        for node in cluster.nodes
        for index, gpu in enumerate(node.gpus)
        if cluster.is_held(gpu)
    }


def test_allocations_of_anybody_take_their_slices() -> None:
    board = with_pools()
    board.settle(claim("a", seats=[("n1", at("1g.10gb", 6)), ("n2", at("3g.40gb", 4, 1))]))
    assert occupied(board)["n1/0"] == "00000010"
    assert occupied(board)["n2/1"] == "00001111"
    board.settle(claim("a", seats=[("n1", at("4g.40gb", 0))], version=2))
    assert occupied(board) == {
        "n1/0": "11110000", "n1/1": "00000000", "n2/0": "00000000", "n2/1": "00000000",
    }  # fmt: skip
    assert board.state.tenants["team"].usage.memory_slices == 4
    board.settle(claim("a", version=3))
    assert board.state.cluster.occupied_slices == 0


def test_allocations_that_exclude_each_other_hold_the_gpu_until_one_goes() -> None:
    board = with_pools("n1")
    board.settle(claim("a", seats=[("n1", at("4g.40gb", 0))]))
    board.settle(claim("b", seats=[("n1", at("1g.10gb", 0)), ("n1", at("1g.10gb", 0, 1))]))
    assert set(board.clashes) == {"uid-b"}
    assert board.clashes["uid-b"].against == {"uid-a"}
    assert board.excluded("uid-a")
    assert board.excluded("uid-b")
    assert board.clashes["uid-b"].claim is board.claim("uid-b")
    assert held(board) == {"n1/0", "n1/1"}
    assert occupied(board) == {"n1/0": "11110000", "n1/1": "00000000"}
    freed = board.freed
    board.forget("uid-a")
    assert not board.clashes
    assert not board.excluded("uid-b")
    assert not held(board)
    assert board.freed > freed
    assert occupied(board) == {"n1/0": "10000000", "n1/1": "10000000"}


def test_whoever_moves_away_makes_room_for_the_other() -> None:
    board = with_pools("n1")
    board.settle(claim("a", seats=[("n1", at("4g.40gb", 0))]))
    board.settle(claim("b", seats=[("n1", at("1g.10gb", 0))]))
    board.settle(claim("a", seats=[("n1", at("3g.40gb", 4))], version=2))
    assert not board.clashes
    assert occupied(board)["n1/0"] == "10001111"


def test_what_was_decided_is_named_as_it_was_published() -> None:
    board = with_pools("n1")
    got = board.offers.place([Request("4g.40gb"), Request("3g.40gb")], lambda node: True)
    assert isinstance(got, tuple)
    made = claim("a")
    seats = board.decided(made, got, {"pod": "p"})
    assert seats == (
        Seat(DRIVER, "n1", at("4g.40gb", 0)), Seat(DRIVER, "n1", at("3g.40gb", 4)),
    )  # fmt: skip
    given_ = claim("a", seats=[("n1", seat.device) for seat in seats], version=2)
    rows = board.state.seq
    board.settle(given_)  # it comes back from the API
    assert board.state.seq == rows
    assert board.state.allocations["uid-a"].labels == {"claim": "a", "pod": "p"}


def test_a_pool_that_goes_stays_while_somebody_has_devices_of_it() -> None:
    board = with_pools("n1")
    board.settle(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    board.pools.withdraw((DRIVER, "n1"))
    assert phase(board, "n1") is NodePhase.CORDONED
    assert not isinstance(board.offers.place([Request("1g.10gb")], lambda n: True), tuple)
    board.set_pool((DRIVER, "n1"), POOLS["n1"], "n1")
    assert phase(board, "n1") is NodePhase.READY
    board.pools.withdraw((DRIVER, "n1"))
    board.forget("uid-a")
    assert not board.state.nodes


def test_a_pool_that_comes_back_different_takes_its_claims_along() -> None:
    board = with_pools("n1")
    board.settle(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    board.settle(claim("b", seats=[("n1", at("1g.10gb", 6, 1))]))
    board.set_pool((DRIVER, "n1"), FEWER, "n1")
    assert occupied(board) == {"n1/0": "00000010"}  # the other device is not known any more
    board.set_pool((DRIVER, "n1"), OTHER, "n1")
    assert set(occupied(board).values()) == {"00000000"}  # named otherwise on that model
    board.set_pool((DRIVER, "n1"), POOLS["n1"], "n1")
    assert occupied(board) == {"n1/0": "00000010", "n1/1": "00000010"}


def test_a_node_that_is_closed_offers_nothing() -> None:
    board = with_pools("n1", "n2")
    board.pools.set_open("n1", False)
    got = board.offers.place([Request("1g.10gb")], lambda node: True)
    assert isinstance(got, tuple)
    assert board.state.cluster.node_of(got[0].gpu).name == "n2"


def test_tainted_devices_hold_their_gpu() -> None:
    slices = nvidia(A100, 2, "n1")
    slices[1]["spec"]["devices"][3]["taints"] = [{"key": "broken", "effect": "NoSchedule"}]
    board = fresh()
    board.pools.set_open("n1", True)
    board.set_pool((DRIVER, "n1"), read_pool(decoded(slices), Library()), "n1")
    assert held(board) == {"n1/0"}
    board.set_pool((DRIVER, "n1"), POOLS["n1"], "n1")
    assert not held(board)


def test_two_drivers_of_one_node_are_two_nodes_of_the_board() -> None:
    board = with_pools("n1")
    board.set_pool(("other.example.com", "n1"), OTHER, "n1")
    assert list(board.state.nodes) == ["n1", "n1~2"]
    board.pools.set_open("n1", False)
    assert {node.phase for node in board.state.nodes.values()} == {NodePhase.CORDONED}


def test_namespaces_are_tenants_with_quotas() -> None:
    board = with_pools("n1")
    board.set_tenant("team", QuotaRecord(memory_slices=8))
    board.settle(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    board.drop_tenant("team")
    assert "team" in board.state.tenants  # its claim is still there
    board.forget("uid-a")
    assert "team" not in board.state.tenants


def test_a_namespace_that_is_made_again_stays_when_its_old_claims_go() -> None:
    board = with_pools("n1")
    board.settle(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    board.wait(claim("b"), [Request("1g.10gb")], 5, {"pod": "p"}, "capacity", "full")
    board.drop_tenant("team")
    board.forget("uid-a")
    assert "team" in board.state.tenants  # somebody still waits
    board.set_tenant("team", QuotaRecord(memory_slices=8))
    board.stop_waiting("uid-b")
    assert "team" in board.state.tenants


def test_those_who_wait_are_seen_and_served() -> None:
    board = with_pools("n1")
    made = claim("a")
    board.wait(made, [Request("1g.10gb")], 5, {"pod": "p"}, "capacity", "full")
    board.wait(made, [Request("1g.10gb")], 5, {"pod": "p"}, "capacity", "full")
    assert len(board.state.waiting) == 1
    assert stands(board, "uid-a") == "queued"
    board.settle(claim("a", seats=[("n1", at("1g.10gb", 6))]))
    assert stands(board, "uid-a") == "placed"
    board.wait(claim("b"), [Request("1g.10gb")], 0, {}, "capacity", "full")
    board.stop_waiting("uid-b")
    assert len(board.state.waiting) == 0


def test_whoever_follows_the_journal_sees_the_same() -> None:
    board = Board("default", lambda: 1000.0, lambda: "here")
    board.journal._keep = 5  # so that rows are dropped, and an image stands for them
    for name in ("n1", "n2"):
        board.pools.set_open(name, True)
        board.set_pool((DRIVER, name), POOLS[name], name)
    for number in range(20):
        board.settle(claim(f"c{number}", seats=[("n1", at("1g.10gb", number % 7))]))
        board.forget(f"uid-c{number}")
    board.settle(claim("last", seats=[("n2", at("2g.20gb", 2))]))
    follower = fresh().state
    load(board.journal, follower)
    assert follower.seq == board.state.seq
    assert {k: v.parts for k, v in follower.allocations.items()} == {
        k: v.parts for k, v in board.state.allocations.items()
    }


Deed = Callable[[Board], None]

PLACES = [
    at("1g.10gb", 0), at("1g.10gb", 6), at("4g.40gb", 0), at("3g.40gb", 4, 1), at("7g.80gb", 0, 1),
]  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 60))
def test_a_board_is_what_the_api_says_however_it_came_about(seed: int, steps: int) -> None:
    """Claims, pools and nodes come and go; a board made anew from what is left looks the same."""
    chance = random.Random(seed)
    board = fresh()
    published: dict[str, PoolReading] = {}
    opened: set[str] = set()
    claims: dict[str, ResourceClaim] = {}

    def publish(into: Board, name: str) -> None:
        into.set_pool((DRIVER, name), published[name], name)

    for _ in range(steps):
        name = chance.choice(("n1", "n2"))
        match chance.randrange(5):
            case 0:
                published[name] = chance.choice(
                    [POOLS[name], FEWER if name == "n1" else POOLS["n2"]]
                )
                publish(board, name)
            case 1:
                published.pop(name, None)
                board.pools.withdraw((DRIVER, name))
            case 2:
                (opened.add if chance.random() < 0.7 else opened.discard)(name)
                board.pools.set_open(name, name in opened)
            case _:
                key = f"c{chance.randrange(6)}"
                if chance.random() < 0.3:
                    claims.pop(key, None)
                    board.forget(f"uid-{key}")
                else:
                    seats = [(name, one) for one in chance.sample(PLACES, chance.randrange(3))]
                    claims[key] = claim(key, seats=seats, version=chance.randrange(1000))
                    board.settle(claims[key])

    anew = fresh()
    for name in sorted(opened):
        anew.pools.set_open(name, True)
    for name in published:
        publish(anew, name)
    # Whoever is first keeps the slices where allocations exclude each other, so the same order.
    order = [*board.state.allocations, *board.clashes]
    for uid in order:
        anew.settle(claims[uid.removeprefix("uid-")])
    for one in claims.values():
        anew.settle(one)
    there = {gpu for gpu in occupied(board) if gpu.split("/")[0] in published}
    assert {gpu: occupied(board)[gpu] for gpu in there} == occupied(anew)
    assert {gpu for gpu in held(board) if gpu in there} == held(anew)
    open_nodes = {name for name, node in board.state.nodes.items() if node.phase is NodePhase.READY}
    assert open_nodes == {name for name in published if name in opened}


def test_a_quota_that_changes_is_room_that_appears() -> None:
    board = with_pools("n1")
    board.set_tenant("team", QuotaRecord(instances=1))
    freed = board.freed
    board.set_tenant("team", QuotaRecord(instances=1))
    assert board.freed == freed
    board.set_tenant("team", QuotaRecord(instances=2))
    assert board.freed > freed


@pytest.mark.parametrize("admin", [False, True])
def test_administrators_take_nothing(admin: bool) -> None:
    board = with_pools("n1")
    made = claim("a", seats=[("n1", at("7g.80gb", 0))])
    assert made.status.allocation is not None
    (result,) = made.status.allocation.devices.results
    result = msgspec.structs.replace(result, admin_access=admin)
    devices = msgspec.structs.replace(made.status.allocation.devices, results=(result,))
    allocation = msgspec.structs.replace(made.status.allocation, devices=devices)
    status = msgspec.structs.replace(made.status, allocation=allocation)
    board.settle(msgspec.structs.replace(made, status=status))
    assert board.state.cluster.occupied_slices == (0 if admin else 8)


def test_a_claim_of_two_pools_takes_its_slices_of_both_whichever_is_published_first() -> None:
    board = with_pools("n1")
    board.settle(claim("a", seats=[("n1", at("1g.10gb", 6)), ("n2", at("2g.20gb", 0))]))
    assert board.state.cluster.occupied_slices == 1
    board.pools.set_open("n2", True)
    board.set_pool((DRIVER, "n2"), POOLS["n2"], "n2")
    assert board.state.cluster.occupied_slices == 3
    board.forget("uid-a")
    assert board.state.cluster.occupied_slices == 0
