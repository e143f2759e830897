"""A tenant tries to infer what others do: only changes of the map may change its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Harness

from slicewise.server.routes.table import ROUTES

EVERY_ENTRY = {"seq", "points"}
"""The number of the latest journal entry counts those of all tenants; points are compared apart."""
PUBLIC = {"openapi", "readyz"}
"""They are the same for all callers, with or without a token."""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path, {"policy": "rehearsed", "requests_per_second": 1e6})
    yield made
    made.close()


def seen(harness: Harness, token: str, names: dict[str, str]) -> dict[str, Any]:
    """Everything that a tenant can read, except for numbers of journal entries."""
    found: dict[str, Any] = {}
    for route in ROUTES:
        if route.method != "GET" or route.name in {"followEvents", *PUBLIC}:
            continue
        path = route.path.format(**names)
        for query in ("", "?gpus=true"):
            answer = harness.get(path + query, token=token)
            if answer.status_code == 200:
                body = answer.json()
                points = [one | {"at": None} for one in body.get("points", ())]
                kept = {name: body[name] for name in body.keys() - EVERY_ENTRY}
                if isinstance(kept.get("waiting"), dict):
                    del kept["waiting"]["others_ahead"]  # that, and no more, it may know
                found[path + query] = kept | {"last point": points[-1:]}
    body = {"profile": "7g.80gb", "wait_seconds": 60}
    for terms in (body, {"profile": "1g.10gb"}):
        tried = harness.post("/v1/allocations/dry-run?plan=true", terms, token=token).json()
        found[f"dry run of {terms['profile']}"] = tried | {"seq": None}
    return found


def test_what_leaves_the_map_as_it_is_changes_no_answer_to_others(harness: Harness) -> None:
    harness.node(gpus=1)
    mine, other = harness.tenant("acme"), harness.tenant("zen")
    looker = harness.token("read-only", tenant="acme")
    harness.place("3g.40gb", token=other)
    held = harness.place("3g.40gb", token=mine)
    waits = {"profile": "2g.20gb", "wait_seconds": 3600}
    queued = harness.post("/v1/allocations", waits, token=mine).json()
    assert queued["state"] == "queued"

    for identity in (held["id"], queued["id"]):
        names = {"id": identity, "name": "n1"}
        before = [seen(harness, token, names) for token in (mine, looker)]
        assert before[0]["/v1/cluster"]["waiting"] == 1
        assert before[0]["/v1/nodes/n1"]["name"] == "n1"
        made = []
        for profile in ("7g.80gb", "3g.40gb", "3g.40gb"):  # some wait, some are rejected
            body = {"profile": profile, "wait_seconds": 3600}
            made.append(harness.post("/v1/allocations", body, token=other).json())
            assert harness.post("/v1/allocations", {"profile": profile}, token=other).is_error
        harness.post("/v1/allocations/batch", {"allocations": [waits]}, token=other)
        during = [seen(harness, token, names) for token in (mine, looker)]
        assert during == before
        assert harness.get("/v1/cluster").json()["waiting"] == 4, "staff sees all"
        for one in made:
            harness.delete(f"/v1/allocations/{one['id']}", token=other)


def test_a_tenant_counts_its_own_queued_requests(harness: Harness) -> None:
    harness.node(gpus=1)
    tokens = {name: harness.tenant(name) for name in ("acme", "zen", "idle")}
    harness.place("7g.80gb")
    body = {"profile": "1g.10gb", "wait_seconds": 3600}
    for name in ("acme", "zen", "zen"):
        assert harness.post("/v1/allocations", body, token=tokens[name]).status_code == 202
    expected = {"acme": 1, "zen": 2, "idle": 0}

    def counts(token: str) -> list[int]:
        last = harness.get("/v1/stats", token=token).json()["points"][-1]
        views = [harness.get(f"/v1/{name}", token=token).json() for name in ("cluster", "queue")]
        devices = harness.get("/v1/cluster?gpus=true", token=token).json()
        return [last["waiting"], *(view["waiting"] for view in (*views, devices))]

    # Each after the others, at the same journal entry: what one gets is not kept for the next.
    for name in ("zen", "acme", "idle", "zen"):
        assert counts(tokens[name]) == [expected[name]] * 4
    assert counts("") == [3] * 4
    harness.clock.now += 10
    harness.run(harness.service.context.recent_stats.update())
    for name, token in tokens.items():
        points = harness.get("/v1/stats", token=token).json()["points"]
        assert [point["waiting"] for point in points][-2:] == [expected[name]] * 2
