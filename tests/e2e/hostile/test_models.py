"""GPU models reported by agents: memory stays bounded, and the number of models is limited."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.conftest import Open, Tell
from tests.e2e.server import Server
from tests.server.harness import Harness

from slicewise.core import states
from slicewise.journal.entries import GeometryRecord, ProfileRecord

HELLOS = 20
SETTINGS = ("limits.hellos_per_minute=1000000", "limits.models=4")
MEGABYTE = 1 << 20
ROOM = 120 * MEGABYTE
"""Memory of a large model and its successor, with garbage in between."""


def model(number: int, slices: int = 10) -> GeometryRecord:
    """Return a legal model that is unlike all others; with 10 slices it has some 3,000 states."""
    profiles = tuple(
        ProfileRecord(f"{size}g.{number}gb", size, 1, size, tuple(range(slices - size + 1)))
        for size in (1, 2, 3)
    )
    return GeometryRecord(f"Made-{number}", slices, slices, profiles, slices)


def agent(server: Server, node: str) -> str:
    """Return the secret of a token for a node's agent."""
    status, made = server.ask("POST", "/v1/tokens", {"role": "agent", "node": node})
    assert status == 201, made
    return str(made["token"])


def hello(server: Server, token: str, geometry: GeometryRecord) -> tuple[int, Any]:
    """Start an agent session on a node with such GPUs."""
    return server.ask("POST", "/v1/agent/hello", hello_body(geometry), token=token)


def hello_body(geometry: GeometryRecord) -> dict[str, Any]:
    """Return the hello of an agent on a node with one such GPU."""
    return {
        "boot": "boot-1",
        "agent": "0.1.0",
        "driver": "580.65.06",
        "model": geometry.model,
        "geometry": msgspec.to_builtins(geometry),
        "gpus": [{"uuid": "GPU-0", "mig": True}],
    }


def models(server: Server) -> set[str]:
    """Return the models in use."""
    return {one["model"] for one in server.ask("GET", "/v1/cluster")[1]["models"]}


def test_an_agent_uses_the_memory_of_one_model(open_server: Open, tell: Tell) -> None:
    server = open_server("models", settings=SETTINGS)
    server.start()
    token = agent(server, "gpu-1")
    before = server.resident_bytes
    for number in range(HELLOS):
        status, content = hello(server, token, model(number))
        assert status == 200, content
        assert models(server) == {f"Made-{number}"}
    after = server.resident_bytes
    assert server.stop() == 0
    server.start()
    again = server.resident_bytes
    figures = " -> ".join(f"{size // MEGABYTE} MB" for size in (before, after, again))
    tell(f"{HELLOS} hellos with another model each, and a start: {figures}")
    assert after - before < ROOM
    assert again - before < ROOM
    assert models(server) == {f"Made-{HELLOS - 1}"}


def test_new_models_are_computed_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of a model take a tenth of a second and more, in which nothing else is served."""
    harness = Harness(tmp_path)
    token = harness.token("agent", node="gpu-1")
    computed: list[bool] = []
    reachable = states._reachable

    def noted(*given: Any) -> Any:
        computed.append(threading.current_thread() is threading.main_thread())
        return reachable(*given)

    monkeypatch.setattr(states, "_reachable", noted)
    try:
        for number in range(3):
            before = len(computed)
            answer = harness.post("/v1/agent/hello", hello_body(model(number, 6)), token=token)
            assert answer.status_code == 200, answer.text
            assert len(computed) > before, "each model is new"
        assert not any(computed)
    finally:
        harness.close()


def test_refused_hellos_use_no_memory(open_server: Open) -> None:
    server = open_server("refused", settings=SETTINGS)
    server.start()
    token = agent(server, "gpu-1")
    assert hello(server, token, model(0, 4))[0] == 200
    report = {"gpus": [{"uuid": "GPU-0", "mig": True}], "instances": [], "foreign": []}
    _, session = hello(server, token, model(0, 4))
    server.ask("POST", "/v1/agent/report", report | {"session": session["session"]}, token=token)
    assert server.ask("POST", "/v1/allocations", {"profile": "1g.0gb"})[0] == 201
    before = server.resident_bytes
    for number in range(1, 9):  # the node has an instance, so its model cannot change
        assert hello(server, token, model(number))[0] == 409
    assert server.resident_bytes - before < ROOM


def test_the_number_of_models_is_limited(open_server: Open) -> None:
    server = open_server("many", settings=SETTINGS)
    server.start()
    tokens = [agent(server, f"gpu-{number}") for number in range(5)]
    found = [hello(server, token, model(n, 4))[0] for n, token in enumerate(tokens)]
    assert found == [200] * 4 + [409]
    _, content = hello(server, tokens[4], model(4, 4))
    assert "limits.models" in content["detail"]
    assert hello(server, tokens[4], model(3, 4))[0] == 200  # a model that exists already
    assert hello(server, tokens[0], model(9, 4))[0] == 200  # replaces its own
    assert server.ask("DELETE", "/v1/nodes/gpu-1")[0] == 200
    assert hello(server, tokens[1], model(5, 4))[0] == 200
    assert models(server) == {"Made-9", "Made-2", "Made-3", "Made-5"}


def test_hellos_of_a_node_are_rate_limited(open_server: Open) -> None:
    server = open_server("rate", settings=("limits.hellos_per_minute=3",))
    server.start()
    one, other = agent(server, "gpu-1"), agent(server, "gpu-2")
    found = [hello(server, one, model(0, 4))[0] for _ in range(10)]
    assert found[:3] == [200] * 3
    assert 429 in found
    assert hello(server, other, model(0, 4))[0] == 200


def test_a_report_with_more_instances_than_slices_is_refused(open_server: Open) -> None:
    server = open_server("report", settings=SETTINGS)
    server.start()
    token = agent(server, "gpu-1")
    _, content = hello(server, token, model(0, 4))
    before = server.readiness()
    found = [
        {"gpu": "GPU-0", "uuid": f"MIG-{n}", "profile": "1g.0gb", "start": 0, "size": 1}
        for n in range(300)
    ]
    report = {"gpus": [{"uuid": "GPU-0", "mig": True}], "instances": [], "foreign": found}
    body = report | {"session": content["session"]}
    status, answer = server.ask("POST", "/v1/agent/report", body, token=token)
    assert (status, answer.get("field")) == (400, "foreign")
    assert server.readiness() == before
    status, answer = hello(server, token, model(1, 12))  # more states than any real GPU
    assert (status, answer["field"]) == (400, "geometry")
