"""A service that shows the state of another system: read-only, with that system's status."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from tests.server.harness import Clock
from tests.tenants import ref

from slicewise import load_geometry
from slicewise.config.settings import Settings
from slicewise.control.geometries import record_of
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    ModelEntered,
    NodeAdded,
    Part,
    Role,
    Row,
    TenantSet,
    TokenIssued,
    Want,
)
from slicewise.runtime.source import Source
from slicewise.server.auth import digest_of
from slicewise.server.routes.health import readiness
from slicewise.server.service import Service
from slicewise.store.memory import MemoryStore

WHERE = "this is the farm's own: ask the farmer"


class Farm(Collector):
    """Additional metrics of the source."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("farm_cows", "Cows", value=7)


@dataclass
class Maker:
    """A source whose journal and status the test sets."""

    problem: str = ""
    leads: bool = True
    store: MemoryStore = field(default_factory=lambda: MemoryStore(Clock()))

    def __post_init__(self) -> None:
        self.epoch = self.store.lead("maker", "http://maker", 1e9)
        self.seq = 0
        geometry = load_geometry("A100-80GB")
        self.enter(
            TenantSet(ref("default")),
            TokenIssued("look", digest_of("sw_look"), Role.READ_ONLY),
            ModelEntered(record_of(geometry)),
            NodeAdded("n1", "A100-80GB", 1, 0),
        )

    def enter(self, *entries: Any) -> None:
        assert self.epoch is not None
        rows = [Row(self.seq + 1 + i, 0.0, "maker", entry) for i, entry in enumerate(entries)]
        self.store.append(self.epoch, rows, ())
        self.seq = rows[-1].seq

    def allocate(self, start: int) -> None:
        part = Part("n1", 0, "A100-80GB", "1g.10gb", start, 1, 1, 10.0)
        record = AllocationRecord(
            id=f"a{start}",
            tenant=ref("default"),
            want=Want(profile="1g.10gb"),
            count=1,
            requested=0.0,
            placed=0.0,
            parts=(part,),
        )
        self.enter(Allocated(record))


@pytest.fixture
def maker() -> Maker:
    return Maker()


def visited(maker: Maker, *asked: tuple[str, str], wait_for: int = 0) -> list[httpx.Response]:
    """Start a service over the source's journal, with a read-only token."""

    async def go() -> list[httpx.Response]:
        source = Source(WHERE, lambda: maker.problem, lambda: maker.leads, (Farm(),))
        service = Service(maker.store, Settings(), source=source)
        await service.start("http://here")
        try:
            for start in range(wait_for):
                maker.allocate(start)
            while service.runtime.replica.seq < maker.seq:
                await asyncio.sleep(0.05)
            assert readiness(service.runtime).ready is not bool(maker.problem)
            transport = httpx.ASGITransport(service.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                headers = {"Authorization": "Bearer sw_look", "Content-Type": "application/json"}
                return [
                    await client.request(method, path, headers=headers, content=b"{}")
                    if method != "GET"
                    else await client.get(path, headers=headers)
                    for method, path in asked
                ]
        finally:
            await service.stop()

    return asyncio.run(go())


def test_writes_are_refused_with_the_owner_of_the_state(maker: Maker) -> None:
    for answer in visited(
        maker,
        ("POST", "/v1/allocations"),
        ("DELETE", "/v1/allocations/a1"),
        ("POST", "/v1/nodes"),
        ("POST", "/v1/nodes/n1/drain"),
        ("PATCH", "/v1/tenants/default"),
        ("POST", "/v1/tokens"),
    ):
        assert answer.status_code == 403, answer.text
        assert answer.json()["detail"] == WHERE


def test_reads_work_as_usual(maker: Maker) -> None:
    nodes, refused = visited(maker, ("GET", "/v1/nodes"), ("GET", "/v1/tokens"))
    assert [node["name"] for node in nodes.json()["nodes"]] == ["n1"]
    assert refused.status_code == 403
    assert "read-only" in refused.json()["detail"]


@pytest.mark.parametrize("leads", [True, False])
def test_the_source_determines_readiness_and_leadership(maker: Maker, leads: bool) -> None:
    maker.leads = leads
    [ready] = visited(maker, ("GET", "/readyz"))
    assert ready.status_code == 200
    assert ready.json()["role"] == ("leading" if leads else "following")
    maker.problem = "the cows have not come home"
    [ready] = visited(maker, ("GET", "/readyz"))
    assert ready.status_code == 503
    assert ready.json()["problems"] == ["the cows have not come home"]


def test_metrics_of_the_source_are_served(maker: Maker) -> None:
    [text] = [answer.text for answer in visited(maker, ("GET", "/metrics"), wait_for=2)]
    assert "farm_cows 7.0" in text
    assert "slicewise_is_leader 1.0" in text
    assert "slicewise_instances 2.0" in text
    # Decisions are counted by the process that makes them.
    name = 'slicewise_instances_placed_total{model="A100-80GB",profile="1g.10gb"}'
    assert f"{name} 2.0" in text
    other = Maker(leads=False)
    [text] = [answer.text for answer in visited(other, ("GET", "/metrics"), wait_for=2)]
    assert "slicewise_is_leader 0.0" in text
    assert name not in text
