"""An agent that tells of one GPU model after another takes no more memory than one that tells of
one, and the next start is as small; many agents together meet a limit."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.e2e.conftest import Open, Tell
from tests.e2e.server import Server

from slicewise.control.entries import GeometryRecord, ProfileRecord

HELLOS = 20
SETTINGS = ("limits.hellos_per_minute=1000000", "limits.models=4")
MEGABYTE = 1 << 20
ROOM = 120 * MEGABYTE
"""What a large model and its successor may take, with the garbage in between."""


def model(number: int, slices: int = 10) -> GeometryRecord:
    """A legal model that resembles no other; with 10 slices it has some 3,000 states."""
    profiles = tuple(
        ProfileRecord(f"{size}g.{number}gb", size, 1, size, tuple(range(slices - size + 1)))
        for size in (1, 2, 3)
    )
    return GeometryRecord(f"Made-{number}", slices, slices, profiles, slices)


def agent(server: Server, node: str) -> str:
    """The secret of a token for a node's agent."""
    status, made = server.ask("POST", "/v1/tokens", {"role": "agent", "node": node})
    assert status == 201, made
    return str(made["token"])


def hello(server: Server, token: str, geometry: GeometryRecord) -> tuple[int, Any]:
    """Begin a session on a node of such GPUs."""
    body = {
        "boot": "boot-1",
        "agent": "0.1.0",
        "driver": "580.65.06",
        "model": geometry.model,
        "geometry": msgspec.to_builtins(geometry),
        "gpus": [{"uuid": "GPU-0", "mig": True}],
    }
    return server.ask("POST", "/v1/agent/hello", body, token=token)


def models(server: Server) -> set[str]:
    """The models in use."""
    return {one["model"] for one in server.ask("GET", "/v1/cluster")[1]["models"]}


def test_an_agent_takes_the_memory_of_one_model(open_server: Open, tell: Tell) -> None:
    server = open_server("models", settings=SETTINGS)
    server.start()
    token = agent(server, "gpu-1")
    before = server.resident_bytes
    for number in range(HELLOS):
        status, said = hello(server, token, model(number))
        assert status == 200, said
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


def test_hellos_that_are_refused_leave_nothing_behind(open_server: Open) -> None:
    server = open_server("refused", settings=SETTINGS)
    server.start()
    token = agent(server, "gpu-1")
    assert hello(server, token, model(0, 4))[0] == 200
    report = {"gpus": [{"uuid": "GPU-0", "mig": True}], "instances": [], "foreign": []}
    _, session = hello(server, token, model(0, 4))
    server.ask("POST", "/v1/agent/report", report | {"session": session["session"]}, token=token)
    assert server.ask("POST", "/v1/allocations", {"profile": "1g.0gb"})[0] == 201
    before = server.resident_bytes
    for number in range(1, 9):  # the node has an instance, so it cannot become another one
        assert hello(server, token, model(number))[0] == 409
    assert server.resident_bytes - before < ROOM


def test_the_models_of_all_agents_together_are_limited(open_server: Open) -> None:
    server = open_server("many", settings=SETTINGS)
    server.start()
    tokens = [agent(server, f"gpu-{number}") for number in range(5)]
    found = [hello(server, token, model(n, 4))[0] for n, token in enumerate(tokens)]
    assert found == [200] * 4 + [409]
    _, said = hello(server, tokens[4], model(4, 4))
    assert "limits.models" in said["detail"]
    assert hello(server, tokens[4], model(3, 4))[0] == 200  # one that is there already
    assert hello(server, tokens[0], model(9, 4))[0] == 200  # instead of its own
    assert server.ask("DELETE", "/v1/nodes/gpu-1")[0] == 200
    assert hello(server, tokens[1], model(5, 4))[0] == 200
    assert models(server) == {"Made-9", "Made-2", "Made-3", "Made-5"}


def test_hellos_of_a_node_have_a_rate(open_server: Open) -> None:
    server = open_server("rate", settings=("limits.hellos_per_minute=3",))
    server.start()
    one, other = agent(server, "gpu-1"), agent(server, "gpu-2")
    found = [hello(server, one, model(0, 4))[0] for _ in range(10)]
    assert found[:3] == [200] * 3
    assert 429 in found
    assert hello(server, other, model(0, 4))[0] == 200


def test_a_report_of_more_instances_than_a_gpu_has_slices_is_refused(open_server: Open) -> None:
    server = open_server("report", settings=SETTINGS)
    server.start()
    token = agent(server, "gpu-1")
    _, said = hello(server, token, model(0, 4))
    before = server.readiness()
    found = [
        {"gpu": "GPU-0", "uuid": f"MIG-{n}", "profile": "1g.0gb", "start": 0, "size": 1}
        for n in range(300)
    ]
    report = {"gpus": [{"uuid": "GPU-0", "mig": True}], "instances": [], "foreign": found}
    body = report | {"session": said["session"]}
    status, answer = server.ask("POST", "/v1/agent/report", body, token=token)
    assert (status, answer.get("field")) == (400, "foreign")
    assert server.readiness() == before
    status, answer = hello(server, token, model(1, 12))  # more states than any GPU has
    assert (status, answer["field"]) == (400, "geometry")
