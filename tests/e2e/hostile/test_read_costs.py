"""Reads cost what they return: counted work, which does not grow with the other allocations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Harness

from slicewise.control.allocation_index import AllocationIndex
from slicewise.control.views import allocation_view, node_view
from slicewise.engine.sortedkeys import SortedKeys
from slicewise.server.limits import FairTurns

BATCH = 100
FEW, MANY = 600, 1800
"""Numbers of allocations, both larger than what one page may look at."""


class Work(Counter[str]):
    """Counts places and tickets that are read, and allocations and nodes that are encoded."""

    def of(self, harness: Harness, path: str, token: str = "", **headers: str) -> dict[str, int]:
        """Return the work of one request."""
        self.clear()
        answer = harness.get(path, token=token, headers=headers)
        assert answer.status_code in (200, 304), answer.text
        return dict(self)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()

    def counts(what: str, kind: type, name: str) -> None:
        iterate = getattr(kind, name)

        def iterated(*given: Any, **options: Any) -> Iterator[Any]:
            for one in iterate(*given, **options):
                counted[what] += 1
                yield one

        monkeypatch.setattr(kind, name, iterated)

    def node_viewed(*given: Any) -> Any:
        counted["nodes"] += 1
        return node_view(*given)

    def allocation_viewed(*given: Any) -> Any:
        counted["allocations"] += 1
        return allocation_view(*given)

    counts("places", AllocationIndex, "walk")
    counts("tickets", SortedKeys, "above")
    counts("tickets", SortedKeys, "__iter__")
    monkeypatch.setattr("slicewise.server.cluster_views.node_view", node_viewed)
    monkeypatch.setattr("slicewise.control.waiting.allocation_view", allocation_viewed)
    return counted


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """A service with 512 GPUs on four nodes."""
    made = Harness(tmp_path)
    for number in range(4):
        made.node(name=f"n{number}", gpus=128)
    yield made
    made.close()


def fill(harness: Harness, count: int) -> None:
    """Place allocations until there are this many."""
    body = {"allocations": [{"profile": "1g.10gb", "labels": {"x": "z"}}] * BATCH}
    while harness.get("/v1/allocations?limit=1").json()["total"] < count:
        answer = harness.post("/v1/allocations/batch", body)
        assert answer.status_code == 201, answer.text


def test_a_page_costs_the_same_among_more_allocations(harness: Harness, work: Work) -> None:
    quiet = harness.tenant("quiet")
    pages = ("/v1/allocations", "/v1/allocations?label=x:z&newest=true", "/v1/queue")
    fill(harness, FEW)
    few = [work.of(harness, path) for path in pages]
    assert few[0]["allocations"] == few[1]["allocations"] == 100
    assert 0 < few[0]["places"] < FEW
    fill(harness, MANY)
    assert [work.of(harness, path) for path in pages] == few
    nothing: dict[str, int] = {}
    for path in ("?label=x:y", "?state=queued", "?tenant=quiet", "?label=x:z&state=active"):
        assert work.of(harness, f"/v1/allocations{path}") == nothing, path
    assert work.of(harness, "/v1/allocations?label=x:z", quiet) == nothing


def test_a_page_of_the_queue_costs_the_same_among_more_requests(
    harness: Harness, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, other, quiet = (harness.tenant(name) for name in ("busy", "other", "quiet"))
    for number in range(4):
        assert harness.post(f"/v1/nodes/n{number}/cordon").status_code == 200

    def wait(token: str, count: int) -> None:
        body = {"profile": "7g.80gb", "wait_seconds": 3600}
        for _ in range(count):
            assert harness.post("/v1/allocations", body, token=token).status_code == 202

    wait(busy, 10)
    wait(other, 10)
    asked = [("/v1/queue?limit=5", token) for token in ("", busy, quiet)]
    few = [work.of(harness, *one) for one in asked]
    assert [one.get("allocations", 0) for one in few] == [5, 5, 0]
    wait(other, 110)
    assert [work.of(harness, *one) for one in asked] == few

    turns: list[object] = []
    take = FairTurns.take

    async def taken(self: FairTurns, caller: object) -> None:
        turns.append(caller)
        await take(self, caller)

    monkeypatch.setattr(FairTurns, "take", taken)
    assert work.of(harness, "/v1/queue", other)["allocations"] == 100
    assert len(turns) == 2, "others get turns in between"


def test_the_cluster_is_encoded_once_per_change(harness: Harness, work: Work) -> None:
    path, reader = "/v1/cluster?gpus=true", harness.token("read-only")
    assert work.of(harness, path) == {"nodes": 4}
    assert work.of(harness, path, reader) == {}, "all who see every tenant share one document"
    tag = harness.get(path).headers["etag"]
    assert work.of(harness, path, **{"if-none-match": tag}) == {}
    harness.place("1g.10gb")
    assert work.of(harness, path, reader) == {"nodes": 1}, "only the changed node"
