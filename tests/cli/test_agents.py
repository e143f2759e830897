"""The commands on nodes with agents, against a real service and an agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cli.test_client import ID, Outcome, Run, good, outcome, refused
from tests.client.agent import Agent, when_followed
from tests.client.running import Running, running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One service for all tests."""
    with running(tmp_path_factory.mktemp("agents")) as made:
        yield made


@pytest.fixture
def agent(service: Running) -> Iterator[Agent]:
    made = Agent(service)
    made.hello()
    yield made
    made.close()


@pytest.fixture
def run(service: Running, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that runs a command as the admin."""
    for name in [name for name in os.environ if name.startswith("SLICEWISE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments: str) -> Outcome:
        named = ("--server", service.url, "--token-file", str(service.token_file))
        return outcome(*arguments, *named)

    return run


def test_from_submit_to_release(run: Run, agent: Agent, service: Running) -> None:
    def work() -> None:
        while not (wanted := agent.desired(wait=1)["instances"]):
            pass
        when_followed(service)
        agent.tell(wanted[0]["allocation"], "creating", attempts=2, detail="busy")
        agent.tell(wanted[0]["allocation"], "active", uuid="MIG-1")

    with ThreadPoolExecutor() as helper:
        done = helper.submit(work)
        made = good(run, "submit", "1g.18gb", "--until-active")
        done.result()
    identity = made.out.split()[0]
    assert made.out.rstrip().endswith(", CUDA_VISIBLE_DEVICES=MIG-1")
    shown = good(run, "show", identity).out
    assert ", active" in shown
    assert "use with   CUDA_VISIBLE_DEVICES=MIG-1" in shown
    assert "CDI device slicewise.dev/mig=MIG-1" in shown
    (row,) = good(run, "ls", "--state", "active").lines[1:]
    assert row[:2] == [identity, "active"]
    assert good(run, "release", identity).out == f"{identity} releasing\n"
    assert good(run, "ls").out == "no allocations\n"
    (row,) = good(run, "ls", "--state", "releasing").lines[1:]
    assert row[0] == identity
    agent.tell(identity, "gone")
    assert good(run, "release", identity).out == f"{identity} released\n"


def test_a_failure_is_reported(run: Run, agent: Agent) -> None:
    identity = good(run, "submit", "1g.18gb").out.split()[0]
    agent.tell(identity, "creating", attempts=3, detail="driver busy")
    assert "creating, tried 3 times: driver busy" in good(run, "show", identity).out
    agent.tell(identity, "failed", detail="no luck")
    shown = good(run, "show", identity).out
    assert "state      failed" in shown
    assert "could not be created: no luck" in shown
    agent.tell(identity, "gone")
    (row,) = good(run, "ls", "--state", "failed").lines[1:]
    assert row[0] == identity


def test_nodes(run: Run, agent: Agent, tmp_path: Path) -> None:
    bare = {"gpu": "GPU-0", "uuid": "", "profile": "1g.18gb", "start": 2, "size": 1}
    found = bare | {"uuid": "MIG-x", "start": 0}
    agent.report(foreign=(found, found | {"uuid": "MIG-y", "start": 1}, bare))
    header, row = good(run, "nodes").lines
    assert "Foreign" in header
    assert row[0] == "gpu-07"
    shown = good(run, "nodes", "show", "gpu-07").out
    assert "driver     580.65.06" in shown
    assert "1g.18gb@0(foreign)" in shown
    assert "41 C" in shown
    assert good(run, "nodes", "show", "gpu-07", "--json").json["agent"]["reachable"] is True
    names = [line[0] for line in good(run, "nodes", "foreign", "gpu-07").lines[1:]]
    assert names == ["MIG-x", "MIG-y", "gpu0-1g.18gb-2"]
    made = good(run, "nodes", "adopt", "gpu-07", "MIG-x", "--tenant", "default", "--label", "a=b")
    identity = made.lines[0][0]
    assert len(identity) == len(ID.replace("[a-z2-7]{20}", "x" * 20))
    gone = good(run, "nodes", "evict", "gpu-07", "MIG-y")
    assert gone.out == "MIG-y: evicting\n"
    listed = good(run, "nodes", "foreign", "gpu-07", "--json").json
    assert [one["evicting"] for one in listed] == [True, False]
    assert "evicting" in good(run, "nodes", "foreign", "gpu-07").out
    assert "no foreign instance 'MIG-z'" in refused(run, "nodes", "evict", "gpu-07", "MIG-z")
    agent.report()
    assert good(run, "nodes", "foreign", "gpu-07").out == "no foreign instances\n"
    good(run, "release", identity)
    agent.tell(identity, "gone")


def test_a_driver_that_differs_from_the_catalog(run: Run, agent: Agent) -> None:
    agent.hello(disagreements=["1g.18gb: otherwise"], gpus=[{"uuid": "GPU-0", "mig": False}])
    assert good(run, "nodes").lines[1][-3:] == ["geometry,", "1", "GPU"]
    shown = good(run, "nodes", "show", "gpu-07").out
    assert "held       geometry: 1g.18gb: otherwise" in shown
    assert "MIG mode is off" in shown
    assert "held: geometry, 1 GPU" in good(run, "top", "--once").out
    accepted = good(run, "nodes", "accept", "gpu-07").out
    assert accepted == "gpu-07: H200-141GB accepted, ready\n"
    agent.hello()
    assert "Held" not in good(run, "nodes").out
    told = good(run, "events", "--after", "0", "--count", "6").out
    assert "agent-joined gpu-07: agent 0.1.0, driver 580.65.06, 1 GPU [" in told
