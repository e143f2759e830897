"""What is kept for reads, held against what the state says: the index, the snapshot, the turns."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.box import Box
from tests.control.office import A100, Office
from tests.control.test_agents_walk import PROFILES, Watch, agent_step, command
from tests.service.house import House

from slicewise.control.allocation_index import (
    EVERY,
    AllocationIndex,
    Key,
    keys_of,
    place_of,
)
from slicewise.control.commands import Create, RemoveTenant, SetTenant, Terms
from slicewise.control.entries import QuotaRecord, Role, TokenIssued, Want
from slicewise.control.reports import ClusterView
from slicewise.control.state import State
from slicewise.control.views import node_view
from slicewise.control.wire import encode
from slicewise.service.auth import Caller
from slicewise.service.capacity import Capacity
from slicewise.service.devices import gpu_views
from slicewise.service.snapshot import SCOPES, Snapshots, cluster_view

STATES = ("queued", "placed", "creating", "active", "releasing")
KEYS: list[Key] = [
    EVERY,
    *(("tenant", name) for name in ("acme", "zen")),
    *(("state", state) for state in STATES),
    *(("label", "team", str(number)) for number in range(3)),
]


def bearer(tenant: str | None) -> Caller:
    """Who sees one tenant's things, or all."""
    return Caller(TokenIssued("t", "", Role.READ_ONLY, tenant))


def plain(state: State, caller: Caller, devices: bool, history: str = "") -> bytes:
    """The cluster in one go: what the snapshot keeps in pieces."""
    nodes = sorted(state.nodes.values(), key=lambda node: node.name)
    view = cluster_view(state, Capacity(state), history)
    fields = {name: getattr(view, name) for name in view.__struct_fields__} | {
        "nodes": tuple(node_view(state, node) for node in nodes),
        "devices": tuple(gpu for node in nodes for gpu in gpu_views(state, node, caller))
        if devices
        else None,
    }
    return encode(ClusterView(**fields))


def told(snapshots: Snapshots, caller: Caller, devices: bool) -> bytes:
    """The cluster as the snapshot has it, where no other request comes in between."""

    async def pace() -> None: ...

    return b"".join(asyncio.run(snapshots.whole(caller, devices, pace))[1])


def listed(state: State, key: Key) -> list[tuple[float, str]]:
    """The places of a list, looked for in all allocations."""
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


@pytest.mark.unmeasured
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 120))
@settings(max_examples=25)
def test_index_and_snapshot_say_what_the_state_says(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    office = Office()
    office.tenant("acme")
    office.tenant("zen")
    office.node("plain", 2, A100)
    boxes = [Box("b0", ["GPU-a", "GPU-b"], rng), Box("b1", ["GPU-c"], rng)]
    for box in boxes:
        box.hello(office)
    watch = Watch(office, index=AllocationIndex())
    state = watch.state
    snapshots = Snapshots(state, Capacity(state))
    callers = [bearer(tenant) for tenant in (None, "acme", "zen")]
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
        for caller in rng.sample(callers, 2):
            devices = rng.random() < 0.7
            assert told(snapshots, caller, devices) == plain(state, caller, devices)
        key = rng.choice(KEYS)
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


def test_an_index_cleans_up_behind_itself() -> None:
    office = Office()
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


def test_scopes_that_are_not_asked_for_are_dropped() -> None:
    office = Office()
    office.tenant("acme")
    office.node("n", 1, A100)
    state = office.state
    snapshots = Snapshots(state, Capacity(state))
    for number in range(3 * SCOPES):
        caller = bearer(f"tenant-{number}")
        assert told(snapshots, caller, True) == plain(state, caller, True)
    assert len(snapshots._devices) == SCOPES


def test_the_cluster_is_told_once_a_version(busy: House) -> None:
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


def test_pages_are_cut_by_the_work_they_are(busy: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.service.listing._AT_A_TIME", 2)
    monkeypatch.setattr("slicewise.service.listing._MOST", 4)
    made = [busy.place("1g.10gb", labels={"n": str(n), "all": "x"})["id"] for n in range(11)]
    seventh = made[7]
    made.sort()  # requested at the same moment
    node = {"name": "other", "model": "A100-80GB", "gpus": 1}
    assert busy.post("/v1/nodes", node).status_code == 201
    for newest in ("", "&newest=true"):
        # Nothing on this node: every page is empty, and the next one goes on until the end.
        found, pages = walk_pages(busy, f"/v1/allocations?node=other&limit=3{newest}")
        assert (found, pages > 1) == ([], True)
        for query in ("label=all:x", "profile=1g.10gb", "tenant=default&label=all:x"):
            found, _ = walk_pages(busy, f"/v1/allocations?{query}&limit=3{newest}")
            assert found == (made[::-1] if newest else made)
    found, pages = walk_pages(busy, "/v1/allocations?label=all:x&label=n:7")
    assert (found, pages) == ([seventh], 1), "the shortest list is walked"


def walk_pages(house: House, path: str) -> tuple[list[str], int]:
    """The ids of all pages, and how many pages there were."""
    found, pages, cursor = [], 0, ""
    while True:
        answer = house.get(f"{path}{cursor}").json()
        pages += 1
        found += [one["id"] for one in answer["allocations"]]
        if answer["next"] is None:
            return found, pages
        cursor = f"&cursor={answer['next']}"


def test_a_large_answer_comes_whole(busy: House) -> None:
    node = {"name": "large", "model": "A100-80GB", "gpus": 1024}
    assert busy.post("/v1/nodes", node).status_code == 201
    answer = busy.get("/v1/cluster?gpus=true")
    state = busy.service.plant.state
    caller = bearer(None)
    history = busy.service.plant.history
    assert answer.content == plain(state, caller, True, history)
    assert len(answer.content) > 1 << 16
    assert msgspec.json.decode(answer.content)["devices"][-1]["node"] == "n1"
