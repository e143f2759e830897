"""The cluster, dry runs, plans, models and policies."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.harness import Harness

from slicewise import load_geometry
from slicewise.api.base import encode
from slicewise.control.geometries import record_of
from slicewise.control.state import State
from slicewise.journal.entries import (
    ModelEntered,
    NodeAdded,
    NodePhase,
    NodeRemoved,
    NodeTurned,
    Row,
)
from slicewise.policies import ranking
from slicewise.server.auth import Caller
from slicewise.server.capacity import FreeCapacity
from slicewise.server.cluster_views import gpu_views


def test_an_empty_cluster(harness: Harness) -> None:
    answer = harness.get("/v1/cluster").json()
    assert (answer["gpus"], answer["slices"], answer["nodes"]) == (0, 0, [])
    assert answer["models"] == []
    assert answer["devices"] is None
    assert harness.get("/v1/cluster?gpus=true").json()["devices"] == []
    assert harness.get("/v1/cluster?gpus=maybe").status_code == 400


def test_totals_of_the_cluster(busy: Harness) -> None:
    busy.node(name="n2", model="A30-24GB", gpus=1)
    busy.place("3g.40gb")
    answer = busy.get("/v1/cluster").json()
    assert (answer["gpus"], answer["active_gpus"], answer["instances"]) == (3, 1, 1)
    assert (answer["slices"], answer["free_slices"]) == (20, 16)
    assert answer["policy"] == "rehearsed"
    a30, a100 = sorted(answer["models"], key=lambda use: use["slices"])
    assert (a30["model"], a30["free_slices"]) == ("A30-24GB", 4)
    assert (a100["model"], a100["free_slices"]) == ("A100-80GB", 12)
    assert a100["placements"]["7g.80gb"] == a100["fits"]["7g.80gb"] == 1
    assert a100["placements"]["3g.40gb"] == 3
    assert a100["fits"]["3g.40gb"] == 2
    assert [node["name"] for node in answer["nodes"]] == ["n1", "n2"]


def test_every_gpu(busy: Harness) -> None:
    token = busy.tenant("acme")
    mine, theirs = busy.place("3g.40gb", token=token), busy.place("1g.10gb")
    devices = busy.get("/v1/cluster?gpus=true").json()["devices"]
    assert [(gpu["node"], gpu["gpu"]) for gpu in devices] == [("n1", 0), ("n1", 1)]
    found = {i["allocation"]: i["tenant"] for gpu in devices for i in gpu["instances"]}
    assert found == {mine["id"]: "acme", theirs["id"]: "default"}
    devices = busy.get("/v1/cluster?gpus=true", token=token).json()["devices"]
    found = {i["allocation"]: i["tenant"] for gpu in devices for i in gpu["instances"]}
    assert found == {mine["id"]: "acme", None: None}
    assert sum(gpu["mask"].count("1") for gpu in devices) == 5


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb", "1g.6gb", "2g.12gb"]), st.booleans()
        ),
        max_size=40,
    ),
    cordoned=st.booleans(),
)
def test_capacity_equals_a_count(steps: list[tuple[str, bool]], cordoned: bool) -> None:
    state = State()

    def enter(entry: object) -> None:
        state.apply(Row(state.seq + 1, 0, "", entry))  # type: ignore[arg-type]

    capacity = FreeCapacity(state)
    assert capacity.models() == ()
    for model, nodes in (("A100-80GB", ("a", "gone", "c")), ("A30-24GB", ("b",))):
        enter(ModelEntered(record_of(load_geometry(model))))
        for name in nodes:
            enter(NodeAdded(name, model, 2, state.cluster.next_gpus(2)))
    enter(NodeRemoved("gone"))
    for profile, release in steps:
        state.scheduler.submit(profile)
        instances = list(state.cluster.instances())
        if release and instances:
            state.cluster.release(instances[len(instances) // 2])
    if cordoned:
        enter(NodeTurned("a", NodePhase.CORDONED))
    nodes_there = list(state.nodes.values())
    taken = [
        sum(state.cluster.state(gpu).mask.bit_count() for gpu in node.gpus) for node in nodes_there
    ]
    assert capacity.occupied_slices(nodes_there) == taken
    for use in capacity.models():
        geometry = state.geometries[use.model]
        of_model = [n for n in nodes_there if n.geometry is geometry]
        open_gpus = [g for n in of_model for g in n.gpus if g in state.cluster.schedulable]
        assert use.gpus == sum(len(n.gpus) for n in of_model)
        assert use.schedulable_gpus == len(open_gpus)
        assert use.slices == use.gpus * geometry.slices
        starts: Counter[str] = Counter()
        fits: Counter[str] = Counter()
        for gpu in open_gpus:
            for offered in geometry.profiles:
                count = len(state.cluster.state(gpu).feasible_starts(offered))
                starts[offered.name] += count
                fits[offered.name] += count > 0
        assert use.placements == dict(starts) or not open_gpus
        assert use.fits == dict(fits) or not open_gpus
    assert sum(use.free_slices for use in capacity.models()) == state.cluster.free_slices


def test_gpus_of_the_cluster_equal_those_of_nodes(busy: Harness) -> None:
    for profile in ("3g.40gb", "1g.10gb", "2g.20gb", "1g.10gb"):
        busy.place(profile)
    state = busy.service.runtime.state
    caller = Caller(next(iter(state.tokens.values())))
    node = state.nodes["n1"]
    shown = busy.get("/v1/cluster?gpus=true").json()["devices"]
    assert shown[: len(node.gpus)] == json.loads(encode(gpu_views(state, node, caller)))


def test_a_dry_run_predicts_the_placement(busy: Harness) -> None:
    busy.place("1g.10gb")
    before = busy.get("/v1/cluster?gpus=true").json()
    answer = busy.post(
        "/v1/allocations/dry-run?policy=mfi&policy=worst-fit", {"profile": "3g.40gb"}
    )
    assert answer.status_code == 200
    body = answer.json()
    assert busy.get("/v1/cluster?gpus=true").json() == before
    assert body["outcome"] == "placed"
    assert body["policy"] == "rehearsed"
    (spot,) = body["instances"]
    assert body["cost"]["placements_lost"] > 0
    assert body["alternatives"]
    assert all("rehearsed" in other["why"] for other in body["alternatives"])
    assert [choice["policy"] for choice in body["policies"]] == ["mfi", "worst-fit"]
    assert body["policies"][1]["spot"]["gpu"] != spot["gpu"]
    placed = busy.place("3g.40gb")
    assert (placed["node"], placed["gpu"], placed["start"]) == (
        spot["node"],
        spot["gpu"],
        spot["start"],
    )


def test_dry_runs_of_equivalent_needs_are_ranked_once(
    busy: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranking all states for a new kind of request is slow, and tenants choose the numbers."""
    ranked: list[object] = []

    def build(*arguments: Any) -> ranking.Row:
        ranked.append(arguments[-1])
        return original(*arguments)

    original = ranking.build_row
    monkeypatch.setattr(ranking, "build_row", build)
    for tenth in range(10):
        body = {"need": {"compute": 2, "memory_gb": 15 + tenth / 10}}
        assert busy.post("/v1/allocations/dry-run", body).json()["outcome"] == "placed"
    assert len(set(ranked)) <= 1


def test_a_dry_run_of_several_and_of_too_many(busy: Harness) -> None:
    body = busy.post("/v1/allocations/dry-run", {"profile": "7g.80gb", "count": 2}).json()
    assert len(body["instances"]) == 2
    assert body["detail"].endswith("and 1 more elsewhere")
    assert busy.get("/v1/cluster").json()["free_slices"] == 16
    body = busy.post("/v1/allocations/dry-run", {"profile": "7g.80gb", "count": 3}).json()
    assert (body["outcome"], body["reason"], body["cost"]) == ("rejected", "capacity", None)
    body = busy.post(
        "/v1/allocations/dry-run?policy=mfi", {"profile": "1g.5gb", "wait_seconds": 5}
    ).json()
    assert (body["outcome"], body["reason"]) == ("queued", "capacity")  # no node offers it
    assert body["policies"][0]["spot"] is None
    assert "1g.5gb" in body["policies"][0]["detail"]


def test_a_dry_run_gives_the_answer_of_the_request(busy: Harness) -> None:
    for wish, status in (({"profile": "1g.12gb"}, 409), ({"profile": "9g.1gb"}, 400)):
        told = busy.post("/v1/allocations", wish)
        tried = busy.post("/v1/allocations/dry-run", wish)
        assert told.status_code == status
        assert tried.json()["detail"] == told.json()["detail"]
        if status == 400:
            assert tried.json() == told.json()
        else:
            assert tried.json()["reason"] == told.json()["reason"] == "capacity"


def test_a_dry_run_checks_quotas(busy: Harness) -> None:
    token = busy.tenant("acme", memory_slices=2, max_lease_seconds=60)
    run = "/v1/allocations/dry-run"
    assert busy.post(run, {"profile": "1g.10gb"}, token=token).json()["outcome"] == "placed"
    for body in (
        {"profile": "3g.40gb"},
        {"profile": "1g.10gb", "lease_seconds": 61},
        {"profile": "1g.10gb", "lease_seconds": 61, "wait_seconds": 60},
        {"need": {"compute": 1, "memory_gb": 1}, "count": 3},
    ):
        answer = busy.post(run, body, token=token).json()
        assert (answer["outcome"], answer["reason"]) == ("rejected", "quota")
    token = busy.tenant("odd", memory_slices=2)
    # The least it could take is within the quota; what the policy would choose is not.
    need = {"need": {"compute": 1, "memory_gb": 15}}
    assert busy.post(run, need, token=token).json()["outcome"] == "placed"


def test_invalid_dry_runs_are_refused(busy: Harness) -> None:
    run = "/v1/allocations/dry-run"
    assert busy.post(f"{run}?policy=nonsense", {"profile": "1g.10gb"}).status_code == 400
    assert busy.post(f"{run}?policy=peer-volcano", {"profile": "1g.10gb"}).status_code == 400
    assert busy.post(f"{run}?alternatives=99", {"profile": "1g.10gb"}).status_code == 400
    assert busy.post(run, {}).status_code == 400
    assert busy.post(run, {"profile": "1g.10gb", "tenant": "unknown"}).status_code == 404
    body = busy.post(f"{run}?alternatives=0", {"profile": "1g.10gb"}).json()
    assert body["alternatives"] == []


def test_a_dry_run_does_not_advance_a_rotating_policy(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"policy": "round-robin"})
    harness.node()
    for _ in range(3):
        runs = [
            harness.post("/v1/allocations/dry-run", {"profile": "1g.10gb"}).json() for _ in range(2)
        ]
        assert runs[0] == runs[1]
        placed = harness.place("1g.10gb")
        assert runs[0]["instances"] == placed["instances"]
    harness.close()


def test_a_plan_is_made_and_executed(busy: Harness) -> None:
    ids = [busy.place("1g.10gb")["id"] for _ in range(14)]
    state = busy.service.runtime.state
    # Keep one instance in the middle of each GPU, so that no GPU is empty.
    keep = {}
    for identity in ids:
        part = state.allocations[identity].parts[0]
        if part.start == 3:
            keep[part.gpu] = identity
    for identity in ids:
        if identity not in keep.values():
            busy.delete(f"/v1/allocations/{identity}")
    assert len(keep) == 2
    assert busy.post("/v1/allocations", {"profile": "7g.80gb"}).status_code == 409
    plan = busy.get("/v1/defrag/plan?profile=7g.80gb").json()
    assert plan["found"]
    assert plan["fewest"]
    assert len(plan["moves"]) == 1
    assert plan["fits"]["node"] == "n1"
    done = busy.post("/v1/defrag", {"moves": plan["moves"]})
    assert (done.status_code, done.json()) == (200, {"moves": 1})
    again = busy.post("/v1/defrag", {"moves": plan["moves"]})
    assert (again.status_code, again.json()["reason"]) == (409, "stale")
    busy.place("7g.80gb")
    wrong = [plan["moves"][0] | {"profile": "2g.20gb"}]
    assert busy.post("/v1/defrag", {"moves": wrong}).status_code == 409
    assert busy.post("/v1/defrag", {"moves": []}).status_code == 400
    unknown = [plan["moves"][0] | {"allocation": "unknown"}]
    assert busy.post("/v1/defrag", {"moves": unknown}).status_code == 409
    nowhere = [plan["moves"][0] | {"to_node": "nowhere"}]
    assert busy.post("/v1/defrag", {"moves": nowhere}).status_code == 409


def test_moves_stay_with_their_model(busy: Harness) -> None:
    busy.node(name="n2", model="H100-80GB-SXM5", gpus=1)
    made = busy.place("1g.10gb", models=["A100-80GB"])
    move = {
        "allocation": made["id"],
        "profile": "1g.10gb",
        "node": "n1",
        "gpu": made["gpu"],
        "start": made["start"],
        "to_node": "n2",
        "to_gpu": 0,
        "to_start": 0,
    }
    answer = busy.post("/v1/defrag", {"moves": [move]})
    assert (answer.status_code, answer.json()["reason"]) == (409, "stale")
    assert "another model" in answer.json()["detail"]


def test_plans_that_increase_capacity(busy: Harness) -> None:
    busy.node(name="n2", gpus=1)
    busy.post("/v1/nodes/n2/cordon")
    busy.place("1g.10gb")
    plan = busy.get("/v1/defrag/plan?budget=2&policy=mfi").json()
    assert plan["found"]
    assert plan["wanted"] is None
    assert plan["room_after"] >= plan["room_before"]
    impossible = [busy.place("7g.80gb"), busy.get("/v1/defrag/plan?profile=7g.80gb")][1]
    assert impossible.json()["found"] is False
    for query in (
        "profile=nonsense",
        "budget=1000",
        "policy=nonsense",
        "policy=peer-volcano",
        "model=A100-80GB",
        "profile=1g.10gb&model=H200",
    ):
        assert busy.get(f"/v1/defrag/plan?{query}").status_code == 400, query


def test_models_and_policies(busy: Harness) -> None:
    models = {model["name"]: model for model in busy.get("/v1/models").json()["models"]}
    assert models["A100-80GB"]["in_use"]
    assert not models["A30-24GB"]["in_use"]
    assert "1g.6gb" in [profile["name"] for profile in models["A30-24GB"]["profiles"]]
    refused = [model for model in models.values() if model["refusal"]]
    assert all(model["profiles"] == [] for model in refused)
    policies = {p["name"]: p["in_use"] for p in busy.get("/v1/policies").json()["policies"]}
    assert [name for name, used in policies.items() if used] == ["rehearsed"]
    assert "mfi" in policies
