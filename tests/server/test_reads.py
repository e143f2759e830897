"""The index of allocations and the JSON of the cluster, compared with the state."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.control_plane import A100, ControlPlane
from tests.control.fake_node import FakeNode
from tests.control.test_agents_walk import PROFILES, Watch, agent_step, command
from tests.server.harness import Harness
from tests.tenants import ref

from slicewise.api.base import encode
from slicewise.api.cluster import ClusterView
from slicewise.control.allocation_index import (
    EVERY,
    AllocationIndex,
    Key,
    keys_of,
    place_of,
)
from slicewise.control.commands import Create, RemoveTenant, SetTenant, Terms
from slicewise.control.state import State
from slicewise.control.views import node_view
from slicewise.journal.entries import QuotaRecord, Role, TenantRef, TokenIssued, Want
from slicewise.server.auth import Caller
from slicewise.server.capacity import FreeCapacity
from slicewise.server.cluster_views import MAX_SCOPES, ClusterJson, cluster_view, gpu_views

STATES = ("queued", "placed", "creating", "active", "releasing")
KEYS: list[Key] = [
    EVERY,
    *(("state", state) for state in STATES),
    *(("label", "team", str(number)) for number in range(3)),
]


def bearer(tenant: TenantRef | None) -> Caller:
    """Return a caller that sees the objects of one tenant, or of all."""
    return Caller(TokenIssued("t", "", Role.READ_ONLY, tenant))


def plain(state: State, caller: Caller, devices: bool, history: str = "") -> bytes:
    """The cluster in one go: what the snapshot keeps in pieces."""
    nodes = sorted(state.nodes.values(), key=lambda node: node.name)
    view = cluster_view(state, FreeCapacity(state), history)
    queued = (record for record in state.allocations.values() if record.state == "queued")
    fields = {name: getattr(view, name) for name in view.__struct_fields__} | {
        "waiting": sum(caller.sees(record.tenant) for record in queued),
        "nodes": tuple(node_view(state, node) for node in nodes),
        "devices": tuple(gpu for node in nodes for gpu in gpu_views(state, node, caller))
        if devices
        else None,
    }
    return encode(ClusterView(**fields))


def encoded(cluster: ClusterJson, caller: Caller, devices: bool) -> bytes:
    """The cluster as JSON, with no other request in between."""

    async def pace() -> None: ...

    return b"".join(asyncio.run(cluster.document(caller, devices, pace))[1])


def listed(state: State, key: Key) -> list[tuple[float, str]]:
    """The places of a list, found by a scan of all allocations."""
    every = [*state.allocations.values(), *state.leaving.values()]
    return sorted(place_of(record) for record in every if key in keys_of(record))


def walked(state: State, key: Key, **how: object) -> list[tuple[float, str]]:
    """The places of a list by the index, without stale entries."""
    assert state.index is not None
    found = []
    for place in state.index.walk(key, how.get("mark"), bool(how.get("backward"))):  # type: ignore[arg-type]
        record = state.allocations.get(place[1]) or state.leaving.get(place[1])
        if record is not None and key in keys_of(record):
            found.append(place)
    return found


@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 120))
@settings(max_examples=12)
def test_index_and_cluster_json_equal_the_state(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    office = ControlPlane()
    office.tenant("acme")
    office.tenant("zen")
    office.node("plain", 2, A100)
    boxes = [FakeNode("b0", ["GPU-a", "GPU-b"], rng), FakeNode("b1", ["GPU-c"], rng)]
    for box in boxes:
        box.hello(office)
    watch = Watch(office, index=AllocationIndex())
    state = watch.state
    cluster = ClusterJson(state, FreeCapacity(state))
    for _ in range(steps):
        office.now += rng.choice([0, 1, 5])
        what = rng.random()
        if what < 0.3:
            terms = Terms(
                Want(profile=rng.choice((*PROFILES, "1g.10gb", "3g.40gb"))),
                wait=rng.choice([0, 20]),
                labels={"team": str(rng.randrange(3))} if rng.random() < 0.7 else {},
            )
            office.ask(Create(rng.choice(["acme", "zen"]), terms))
        elif what < 0.6:
            office.ask(command(rng, office, boxes))
        elif what < 0.62:
            office.ask(RemoveTenant("zen"))
            office.ask(SetTenant("zen", QuotaRecord(), new=True))
        else:
            agent_step(rng, office, rng.choice(boxes))
        watch.look(office)
        tenants = [tenant.ref for tenant in state.tenants.values()]
        for caller in map(bearer, rng.sample([None, *tenants], 2)):
            devices = rng.random() < 0.7
            assert encoded(cluster, caller, devices) == plain(state, caller, devices)
        key = rng.choice([*KEYS, *(("tenant", tenant.id) for tenant in tenants)])
        expected = listed(state, key)
        assert walked(state, key) == expected
        assert state.index is not None
        assert state.index.count(key) == len(expected)
        if expected:
            mark = rng.choice(expected)
            behind = [place for place in expected if place > mark]
            assert walked(state, key, mark=mark) == behind
            assert walked(state, key, mark=mark, backward=True) == [
                place for place in reversed(expected) if place < mark
            ]


def test_an_index_drops_empty_keys() -> None:
    office = ControlPlane()
    office.tenant("acme")
    office.node("n", 2000, A100)
    watch = Watch(office, index=AllocationIndex())
    made = [office.create("1g.10gb")[1]["id"] for _ in range(500)]
    for identity in made[:490]:
        office.release(identity)
    watch.look(office)
    index = watch.state.index
    assert index is not None
    assert index.count(EVERY) == 10
    assert len(list(index.walk(EVERY, None))) < 60, "stale entries pile up"
    for identity in made[490:]:
        office.release(identity)
    watch.look(office)
    assert index.count(EVERY) == 0
    assert not list(index.walk(EVERY, None))


def test_unused_scopes_are_dropped() -> None:
    office = ControlPlane()
    office.tenant("acme")
    office.node("n", 1, A100)
    state = office.state
    cluster = ClusterJson(state, FreeCapacity(state))
    for number in range(3 * MAX_SCOPES):
        caller = bearer(ref(f"tenant-{number}"))
        assert encoded(cluster, caller, True) == plain(state, caller, True)
    assert len(cluster._devices) == MAX_SCOPES


def test_the_cluster_has_an_etag(busy: Harness) -> None:
    first = busy.get("/v1/cluster?gpus=true")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "private, no-cache"
    again = busy.get("/v1/cluster?gpus=true", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == tag
    assert "content-length" not in again.headers
    busy.place("1g.10gb")
    other = busy.get("/v1/cluster?gpus=true", headers={"if-none-match": tag})
    assert other.status_code == 200
    assert other.headers["etag"] != tag
    tenant = busy.tenant("zen")
    seen = busy.get("/v1/cluster", token=tenant, headers={"if-none-match": other.headers["etag"]})
    assert seen.status_code == 200, "what one caller knows is not what another may see"


def test_pages_are_limited_by_work(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.server.routes.listing._FILTERED_PER_TURN", 2)
    monkeypatch.setattr("slicewise.server.routes.listing._FILTERED_PER_PAGE", 4)
    made = [busy.place("1g.10gb", labels={"n": str(n), "all": "x"})["id"] for n in range(11)]
    seventh = made[7]
    made.sort()  # requested at the same moment
    node = {"name": "other", "model": "A100-80GB", "gpus": 1}
    assert busy.post("/v1/nodes", node).status_code == 201
    for newest in ("", "&newest=true"):
        # The node has no allocations: all pages are empty, up to the last.
        found, pages = walk_pages(busy, f"/v1/allocations?node=other&limit=3{newest}")
        assert (found, pages > 1) == ([], True)
        for query in ("label=all:x", "profile=1g.10gb", "tenant=default&label=all:x"):
            found, _ = walk_pages(busy, f"/v1/allocations?{query}&limit=3{newest}")
            assert found == (made[::-1] if newest else made)
    found, pages = walk_pages(busy, "/v1/allocations?label=all:x&label=n:7")
    assert (found, pages) == ([seventh], 1), "the shortest list is walked"


def walk_pages(harness: Harness, path: str) -> tuple[list[str], int]:
    """The ids of all pages, and how many pages there were."""
    found, pages, cursor = [], 0, ""
    while True:
        answer = harness.get(f"{path}{cursor}").json()
        pages += 1
        found += [one["id"] for one in answer["allocations"]]
        if answer["next"] is None:
            return found, pages
        cursor = f"&cursor={answer['next']}"


def test_a_large_answer_is_sent_completely(busy: Harness) -> None:
    node = {"name": "large", "model": "A100-80GB", "gpus": 1024}
    assert busy.post("/v1/nodes", node).status_code == 201
    answer = busy.get("/v1/cluster?gpus=true")
    state = busy.service.runtime.state
    caller = bearer(None)
    history = busy.service.runtime.history
    assert answer.content == plain(state, caller, True, history)
    assert len(answer.content) > 1 << 16
    assert msgspec.json.decode(answer.content)["devices"][-1]["node"] == "n1"
