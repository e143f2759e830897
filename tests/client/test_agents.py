"""Clients and agents: waiting for active instances, and foreign instances."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.client.agent import Agent, when_followed
from tests.client.running import Running

from slicewise.client import Client, RejectedError


@pytest.fixture
def agent(service: Running) -> Iterator[Agent]:
    made = Agent(service)
    made.hello()
    yield made
    made.close()


def test_wait_until_active(service: Running, make: Any, agent: Agent) -> None:
    with Client(service.url, service.token) as other:
        first = other.allocate("7g.141gb")
        asked = other.allocate("3g.71gb", count=2, wait_seconds=600)
        assert asked.state == "queued"

        def work() -> None:
            when_followed(service)
            agent.tell(first.id, "active", uuid="MIG-0")
            other.release(first.id)
            agent.tell(first.id, "gone")
            agent.tell(asked.id, "creating", attempts=1)
            agent.tell(asked.id, "active", uuid="MIG-1")
            agent.tell(asked.id, "creating", index=1)
            agent.tell(asked.id, "active", index=1, uuid="MIG-2")

        with make(service.url, service.token) as client, ThreadPoolExecutor() as helper:
            done = helper.submit(work)
            made = client.wait_until_active(asked.id)
            done.result()
            assert made.state == "active"
            assert [part.env for part in made.instances] == [
                "CUDA_VISIBLE_DEVICES=MIG-1",
                "CUDA_VISIBLE_DEVICES=MIG-2",
            ]
            assert client.wait_until_active(asked.id) == made, "at once"


def test_wait_for_an_allocation_that_fails(service: Running, make: Any, agent: Agent) -> None:
    with Client(service.url, service.token) as other:
        asked = other.allocate("1g.18gb")

        def work() -> None:
            when_followed(service)
            agent.tell(asked.id, "creating")
            agent.tell(asked.id, "failed", detail="no luck")

        with make(service.url, service.token) as client, ThreadPoolExecutor() as helper:
            done = helper.submit(work)
            made = client.wait_until_active(asked.id)
            done.result()
        assert made.state == "failed"
        assert made.detail is not None
        assert made.detail.endswith("no luck")


def test_foreign_instances(service: Running, make: Any, agent: Agent) -> None:
    found = {"gpu": "GPU-0", "uuid": "MIG-x", "profile": "1g.18gb", "start": 0, "size": 1}
    agent.report(foreign=(found, found | {"uuid": "MIG-y", "start": 1}))
    with make(service.url, service.token) as client:
        (gpu,) = client.node("gpu-07").devices
        assert [one.name for one in gpu.foreign] == ["MIG-x", "MIG-y"]
        made = client.adopt("gpu-07", "MIG-x", "default", labels={"a": "b"})
        assert (made.state, made.uuid, made.labels) == ("active", "MIG-x", {"a": "b"})
        assert client.evict("gpu-07", "MIG-y").evicting
        assert [one["uuid"] for one in agent.desired()["evict"]] == ["MIG-y"]
        with pytest.raises(RejectedError, match="there is nothing to accept"):
            client.accept("gpu-07")
        agent.report()
        client.release(made.id)
        agent.tell(made.id, "gone")
        agent.hello(disagreements=["1g.18gb: otherwise"])
        assert client.node("gpu-07").holds == {"geometry": "1g.18gb: otherwise"}
        assert client.accept("gpu-07").holds == {}
