"""The agent protocol over HTTP: hello, desired state, reports; actions of operators."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.server.harness import Harness

from slicewise import load_geometry
from slicewise.api.base import encode
from slicewise.control.geometries import record_of
from slicewise.server.auth import Caller
from slicewise.server.cluster_views import gpu_views

GEOMETRY = msgspec.to_builtins(record_of(load_geometry("H200-141GB")))
GPUS = ("GPU-0", "GPU-1")


class Agent:
    """The agent of a node."""

    def __init__(
        self, harness: Harness, node: str = "gpu-07", gpus: tuple[str, ...] = GPUS
    ) -> None:
        self.harness = harness
        self.node = node
        self.gpus = gpus
        self.token = harness.token("agent", node=node)
        self.boot = "boot-1"
        self.session = ""
        self.seq = 0

    def body(self, **changes: Any) -> dict[str, Any]:
        return {
            "boot": self.boot,
            "agent": "0.1.0",
            "driver": "580.65.06",
            "model": "H200-141GB",
            "geometry": GEOMETRY,
            "disagreements": [],
            "gpus": [{"uuid": uuid, "mig": True, "problem": ""} for uuid in self.gpus],
        } | changes

    def hello(self, status: int = 200, reports: bool = True, **changes: Any) -> Any:
        """Begin a session, by default followed by a report without instances."""
        body = self.body(**changes)
        answer = self.harness.post("/v1/agent/hello", body, token=self.token)
        assert answer.status_code == status, answer.text
        if status == 200:
            self.session = answer.json()["session"]
            self.seq = 0
            if reports:
                self.report(gpus=body["gpus"])
        return answer.json()

    def path(self, wait: int) -> str:
        return f"/v1/agent/desired?session={self.session}&after={self.seq}&wait={wait}"

    def desired(self, wait: int = 0) -> list[dict[str, Any]]:
        answer = self.harness.get(self.path(wait), token=self.token)
        assert answer.status_code == 200, answer.text
        self.seq = answer.json()["seq"]
        return list(answer.json()["instances"])

    def report(
        self,
        *instances: dict[str, Any],
        foreign: list[dict[str, Any]] | None = None,
        status: int = 200,
        gpus: list[dict[str, Any]] | None = None,
    ) -> Any:
        body = {
            "session": self.session,
            "gpus": [{"uuid": uuid, "mig": True} for uuid in self.gpus] if gpus is None else gpus,
            "instances": list(instances),
            "foreign": foreign or [],
        }
        answer = self.harness.post("/v1/agent/report", body, token=self.token)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def agent(harness: Harness) -> Agent:
    made = Agent(harness)
    made.hello()
    return made


def told(one: dict[str, Any], phase: str, **more: Any) -> dict[str, Any]:
    return {"allocation": one["id"], "index": 0, "phase": phase} | more


def test_an_instance_from_placed_to_gone(harness: Harness, agent: Agent) -> None:
    node = harness.get("/v1/nodes/gpu-07").json()
    assert (node["managed"], node["gpus"], node["model"]) == (True, 2, "H200-141GB")
    assert agent.desired() == []
    made = harness.place("1g.18gb")
    assert (made["state"], made["phase"], made["uuid"]) == ("placed", "placed", "")
    (wanted,) = agent.desired()
    assert wanted == {
        "allocation": made["id"],
        "index": 0,
        "gpu": made["gpu_uuid"],
        "profile": "1g.18gb",
        "start": made["start"],
        "size": 1,
        "wanted": "present",
        "uuid": "",
        "notice": "",
    }
    agent.report(told(made, "creating", attempts=1, detail="driver busy"))
    seen = harness.get(f"/v1/allocations/{made['id']}").json()
    assert (seen["state"], seen["attempts"]) == ("creating", 1)
    assert seen["instances"][0]["detail"] == "driver busy"
    agent.report(told(made, "active", uuid="MIG-1"))
    seen = harness.get(f"/v1/allocations/{made['id']}").json()
    assert seen["state"] == "active"
    assert seen["env"] == seen["instances"][0]["env"] == "CUDA_VISIBLE_DEVICES=MIG-1"
    assert seen["cdi"] == seen["instances"][0]["cdi"] == "slicewise.dev/mig=MIG-1"
    before = harness.service.runtime.state.seq
    agent.report(told(made, "active", uuid="MIG-1"))
    assert harness.service.runtime.state.seq == before, "nothing new was written"

    ended = harness.delete(f"/v1/allocations/{made['id']}").json()
    assert (ended["state"], ended["phase"]) == ("releasing", "releasing")
    assert harness.get("/v1/tenants/default").json()["usage"]["instances"] == 0
    (unwanted,) = agent.desired()
    assert (unwanted["wanted"], unwanted["uuid"]) == ("absent", "MIG-1")
    assert harness.get("/v1/nodes/gpu-07").json()["free_slices"] == 15
    (listed,) = harness.get("/v1/allocations?state=releasing").json()["allocations"]
    assert listed["id"] == made["id"]
    assert harness.get("/v1/allocations?state=released").json()["allocations"] == []
    agent.report(told(made, "gone"))
    assert harness.get("/v1/nodes/gpu-07").json()["free_slices"] == 16
    seen = harness.get(f"/v1/allocations/{made['id']}").json()
    assert (seen["state"], seen["phase"], seen["env"]) == ("released", "gone", "")
    (listed,) = harness.get("/v1/allocations?state=released").json()["allocations"]
    assert listed["id"] == made["id"]
    assert agent.desired() == []


def test_a_node_is_held_until_its_agent_has_reported(harness: Harness) -> None:
    agent = Agent(harness, gpus=("GPU-0",))
    agent.hello(reports=False)
    why = {"unreported": "its agent has not sent its first report"}
    assert harness.get("/v1/nodes/gpu-07").json()["holds"] == why
    body = {"profile": "3g.71gb"}
    refused = harness.post("/v1/allocations", body)
    assert (refused.status_code, refused.json()["reason"]) == (409, "capacity")
    waits = harness.post("/v1/allocations", body | {"wait_seconds": 600})
    assert waits.status_code == 202
    assert agent.desired() == [], "a poll is no report"
    assert harness.get("/v1/nodes/gpu-07").json()["holds"] == why
    stranger = {"gpu": "GPU-0", "uuid": "MIG-x", "profile": "3g.71gb", "start": 4, "size": 4}
    agent.report(foreign=[stranger])
    assert harness.get("/v1/nodes/gpu-07").json()["holds"] == {}
    (wanted,) = agent.desired()
    assert (wanted["allocation"], wanted["start"]) == (waits.json()["id"], 0)


def test_a_poll_is_answered_on_a_change(harness: Harness, agent: Agent) -> None:
    agent.desired()

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(harness.service.app)
        own = {"authorization": f"Bearer {agent.token}"}
        admin = {"authorization": f"Bearer {harness.admin}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            poll = asyncio.create_task(client.get(agent.path(60), headers=own))
            while not harness.service.context.liveness.waiting:
                await asyncio.sleep(0.001)
            made = await client.post("/v1/allocations", json={"profile": "2g.35gb"}, headers=admin)
            return await poll, made

    poll, made = harness.run(ask())
    assert poll.status_code == 200
    (wanted,) = poll.json()["instances"]
    assert wanted["allocation"] == made.json()["id"]
    assert harness.service.context.liveness.waiting == 0


async def _poll(harness: Harness, agent: Agent, wait: int, then: Any) -> httpx.Response:
    """A poll, and something that happens once it is open."""
    transport = httpx.ASGITransport(harness.service.app)
    headers = {"authorization": f"Bearer {agent.token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        poll = asyncio.create_task(client.get(agent.path(wait), headers=headers))
        while not harness.service.context.liveness.waiting:
            await asyncio.sleep(0.001)
        await then()
        return await poll


def test_a_poll_times_out_without_a_change(harness: Harness, agent: Agent) -> None:
    agent.desired()
    before = agent.seq
    assert agent.desired(wait=1) == []
    assert agent.seq == before
    agent.seq = 10**9  # of a journal that no longer exists
    assert agent.desired(wait=60) == []
    assert agent.seq == before


def test_a_poll_ends_when_the_process_stops(harness: Harness, agent: Agent) -> None:
    agent.desired()

    async def stop() -> None:
        harness.service.close_streams()

    answer = harness.run(_poll(harness, agent, 60, stop))
    assert answer.status_code == 503
    assert "stopping" in answer.json()["detail"]


def test_a_poll_ends_when_the_process_stops_leading(harness: Harness, agent: Agent) -> None:
    agent.desired()

    async def resign() -> None:
        await harness.service.runtime.in_thread(harness.service.runtime.stop_leading)

    answer = harness.run(_poll(harness, agent, 60, resign))
    assert answer.status_code == 503


def test_a_standby_names_the_leader_to_agents(harness: Harness, agent: Agent) -> None:
    other = harness.open("second")
    assert not other.runtime.leads
    answer = harness.call("GET", agent.path(0), token=agent.token, service=other)
    assert answer.status_code == 503
    assert answer.json()["leader"] == "http://first"


def test_a_poll_ends_when_the_agent_disconnects(harness: Harness, agent: Agent) -> None:
    agent.desired()

    async def leave() -> None:
        async with harness.stream(agent.path(60), agent.token) as reader:
            while not harness.service.context.liveness.waiting:
                await asyncio.sleep(0.001)
        assert reader.status == 0

    harness.run(leave())
    assert harness.service.context.liveness.waiting == 0


def test_an_open_poll_of_an_old_session_is_refused(harness: Harness, agent: Agent) -> None:
    agent.desired()
    other = Agent(harness)

    async def join() -> None:
        transport = httpx.ASGITransport(harness.service.app)
        headers = {"authorization": f"Bearer {other.token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            said = await client.post("/v1/agent/hello", json=other.body(), headers=headers)
            assert said.status_code == 200

    answer = harness.run(_poll(harness, agent, 60, join))
    assert answer.status_code == 409
    assert answer.json()["reason"] == "superseded"
    assert agent.report(status=409)["reason"] == "superseded"


def test_an_agent_acts_for_its_own_node_only(harness: Harness, agent: Agent) -> None:
    other = Agent(harness, "gpu-08")
    assert harness.get("/v1/nodes/gpu-07", token=other.token).status_code == 404
    other.session = agent.session
    assert other.report(status=409)["reason"] == "unknown"
    other.hello(gpus=[{"uuid": "GPU-9", "mig": True}])
    made = harness.place("1g.18gb", models=["H200-141GB"])
    mine, theirs = (agent, other) if made["node"] == agent.node else (other, agent)
    theirs.report(told(made, "failed"))
    assert harness.get(f"/v1/allocations/{made['id']}").json()["state"] == "placed"
    mine.report(told(made, "failed", detail="no luck"))
    failed = harness.get(f"/v1/allocations/{made['id']}").json()
    assert (failed["state"], failed["cause"]) == ("failed", "failed")
    assert failed["detail"].endswith("could not be created: no luck")
    mine.report(told(made, "gone"))
    (listed,) = harness.get("/v1/allocations?state=failed").json()["allocations"]
    assert (listed["id"], listed["detail"]) == (made["id"], failed["detail"])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"geometry": GEOMETRY | {"slices": 99}}, "geometry"),
        ({"geometry": GEOMETRY | {"surprise": 1}}, "geometry"),
        (
            {"geometry": GEOMETRY | {"profiles": GEOMETRY["profiles"] * 20}},
            "geometry.profiles",
        ),
        (
            {
                "geometry": {
                    "model": "wild",
                    "slices": 16,
                    "compute": 112,
                    "profiles": [
                        {
                            "name": f"{n}g",
                            "size": 1,
                            "compute": n,
                            "memory_gb": 1,
                            "starts": list(range(16)),
                        }
                        for n in range(1, 8)
                    ],
                }
            },
            "geometry",
        ),
        ({"gpus": []}, "gpus"),
        ({"boot": ""}, "boot"),
        ({"surprise": 1}, None),
    ],
)
def test_an_invalid_hello_is_refused(
    harness: Harness, changes: dict[str, Any], field: str | None
) -> None:
    said = Agent(harness).hello(status=400, **changes)
    assert field is None or said["field"].startswith(field)


def test_an_invalid_report_is_refused(harness: Harness, agent: Agent) -> None:
    made = harness.place("1g.18gb")
    said = agent.report(told(made, "active"), status=400)
    assert said["field"] == "instances[0].uuid"
    assert agent.report(told(made, "flying"), status=400)["status"] == 400


def test_a_lost_agent_holds_its_node_until_its_next_request(harness: Harness, agent: Agent) -> None:
    contacts, state = harness.service.context.liveness, harness.service.runtime.state
    made = harness.place("1g.18gb")
    harness.clock.now += 89
    contacts.check_agents()
    harness.clock.now += 2
    contacts.check_agents()
    harness.wait_for(lambda: "unknown" in state.nodes["gpu-07"].holds)
    contacts.check_agents()
    view = harness.get("/v1/nodes/gpu-07").json()
    assert view["agent"]["reachable"] is False
    assert "2023-11-14T22:13:20" in view["holds"]["unknown"]
    assert harness.post("/v1/allocations", {"profile": "1g.18gb"}).status_code == 409
    assert [one["allocation"] for one in agent.desired()] == [made["id"]]
    assert state.nodes["gpu-07"].holds == {}
    view = harness.get("/v1/nodes/gpu-07").json()
    assert view["agent"]["reachable"] is True
    assert view["agent"]["last_contact"].startswith("2023-11-14T22:14:51")

    # Lost during a request: the hold ends with the next check.
    harness.clock.now += 91
    contacts.check_agents()
    contacts.touch("gpu-07")
    harness.wait_for(lambda: "unknown" in state.nodes["gpu-07"].holds)
    contacts.check_agents()
    harness.wait_for(lambda: not state.nodes["gpu-07"].holds)

    # An open poll is contact, however long it takes.
    async def long_after() -> None:
        harness.clock.now += 1000
        contacts.check_agents()
        harness.clock.now += 1
        harness.service.close_streams()

    seq = state.seq
    harness.run(_poll(harness, agent, 60, long_after))
    assert state.seq == seq


def test_a_new_leader_restarts_the_timeouts_of_agents(harness: Harness, agent: Agent) -> None:
    contacts, state = harness.service.context.liveness, harness.service.runtime.state
    harness.clock.now += 80
    contacts.begin()
    harness.clock.now += 80
    assert contacts.reachable("gpu-07")
    harness.clock.now += 20
    contacts.check_agents()
    harness.wait_for(lambda: "unknown" in state.nodes["gpu-07"].holds)
    contacts.begin()
    assert not contacts.reachable("gpu-07"), "held until it is really heard of"
    contacts.check_agents()
    agent.report()
    assert state.nodes["gpu-07"].holds == {}


def test_a_standby_does_not_watch_agents(harness: Harness, agent: Agent) -> None:
    harness.clock.now += 1000
    harness.service.close_streams()
    harness.service.context.liveness.check_agents()
    assert harness.service.runtime.commit_loop is not None
    assert harness.service.runtime.commit_loop.waiting == 0


def test_reports_of_agents_are_shown(harness: Harness, agent: Agent) -> None:
    made = harness.place("1g.18gb")
    stranger = {"uuid": "MIG-x", "profile": "1g.18gb", "start": 0, "size": 1}
    other = 1 - made["gpu"]
    agent.report(
        told(made, "active", uuid="MIG-1", memory_used=123),
        gpus=[
            {"uuid": GPUS[made["gpu"]], "mig": True, "temperature": 41, "memory_used": 5},
            {"uuid": GPUS[other], "mig": False, "problem": "too hot"},
        ],
        foreign=[stranger | {"gpu": GPUS[other]}],
    )
    view = harness.get("/v1/nodes/gpu-07").json()
    assert (view["foreign"], view["held_gpus"], view["instances"]) == (1, 1, 1)
    assert (view["agent"]["driver"], view["agent"]["version"]) == ("580.65.06", "0.1.0")
    good, bad = view["devices"][made["gpu"]], view["devices"][other]
    assert (good["temperature"], good["memory_used"], good["mig"]) == (41, 5, True)
    assert good["instances"][0]["phase"] == "active"
    assert good["instances"][0]["memory_used"] == 123
    assert bad["holds"] == {"mig": "MIG mode is off", "problem": "too hot"}
    assert (bad["mig"], bad["foreign"][0]["name"]) == (False, "MIG-x")
    assert bad["instances"][0]["phase"] == "foreign"
    tenant = harness.tenant("acme")
    seen = harness.get("/v1/nodes/gpu-07", token=tenant).json()
    assert seen["devices"][other]["foreign"] == []
    device = seen["devices"][made["gpu"]]
    assert (device["temperature"], device["memory_used"]) == (None, None)
    assert seen["devices"][made["gpu"]]["instances"][0]["memory_used"] is None

    # The same, slice by slice, where all GPUs are shown at once.
    state = harness.service.runtime.state
    ended = harness.place("1g.18gb")
    harness.delete(f"/v1/allocations/{ended['id']}")
    node = state.nodes["gpu-07"]
    caller = Caller(next(iter(state.tokens.values())))
    shown = harness.get("/v1/cluster?gpus=true").json()["devices"]
    assert shown == json.loads(encode(gpu_views(state, node, caller)))

    text = harness.get("/metrics").text
    for line in (
        'slicewise_agents{state="reachable"} 1.0',
        'slicewise_managed_instances{phase="active"} 1.0',
        'slicewise_managed_instances{phase="releasing"} 1.0',
        'slicewise_managed_instances{phase="quarantined"} 0.0',
        'slicewise_gpus_held{reason="mig"} 1.0',
        "slicewise_foreign_instances 1.0",
        "slicewise_create_seconds_count 1.0",
        "slicewise_instances 2.0",
    ):
        assert line in text, line
    assert "slicewise_gpu_temperature_celsius{" in text


def test_measurements_of_removed_nodes_are_forgotten(harness: Harness, agent: Agent) -> None:
    agent.report(gpus=[{"uuid": GPUS[0], "mig": True, "temperature": 41}])
    assert "slicewise_gpu_temperature_celsius{" in harness.get("/metrics").text
    assert harness.post("/v1/nodes/gpu-07/drain").status_code == 200
    assert harness.delete("/v1/nodes/gpu-07").status_code == 200
    harness.service.context.liveness.check_agents()
    assert "slicewise_gpu_temperature_celsius{" not in harness.get("/metrics").text


def test_the_total_of_releasing_allocations_is_unknown_with_a_label(
    harness: Harness, agent: Agent
) -> None:
    for team in ("a", "b"):
        made = harness.place("1g.18gb", labels={"team": team})
        harness.delete(f"/v1/allocations/{made['id']}")
    assert harness.get("/v1/allocations?state=releasing").json()["total"] == 2
    page = harness.get("/v1/allocations?state=releasing&label=team:a").json()
    assert (len(page["allocations"]), page["total"]) == (1, None)


def test_operators_accept_adopt_and_evict(harness: Harness, agent: Agent) -> None:
    stranger = {"gpu": "GPU-0", "uuid": "MIG-x", "profile": "1g.18gb", "start": 0, "size": 1}
    agent.report(foreign=[stranger, stranger | {"uuid": "MIG-y", "start": 1}])
    harness.tenant("acme")
    path = "/v1/nodes/gpu-07/foreign"
    made = harness.post(f"{path}/MIG-x/adopt", {"tenant": "acme"})
    assert made.status_code == 201
    assert (made.json()["tenant"], made.json()["env"]) == ("acme", "CUDA_VISIBLE_DEVICES=MIG-x")
    gone = harness.post(f"{path}/MIG-y/evict")
    assert (gone.status_code, gone.json()["evicting"]) == (202, True)
    answer = harness.get(agent.path(0), token=agent.token).json()
    assert answer["evict"] == [{"gpu": "GPU-0", "uuid": "MIG-y", "profile": "1g.18gb", "start": 1}]
    assert harness.post(f"{path}/MIG-z/evict").status_code == 404
    assert harness.post("/v1/nodes/gpu-07/accept").json()["reason"] == "agreed"


def test_plans_do_not_move_instances_of_managed_nodes(harness: Harness, agent: Agent) -> None:
    harness.node(name="plain", model="H200-141GB", gpus=2)
    made = [harness.place("1g.18gb") for _ in range(28)]
    for one in made:
        agent.report(*([told(one, "active", uuid=f"MIG-{one['id']}")] if "uuid" in one else []))
    on_gpu: dict[tuple[str, int], list[Any]] = {}
    for one in made:
        on_gpu.setdefault((one["node"], one["gpu"]), []).append(one)
    gone = []
    for here in on_gpu.values():
        for one in here[:-2]:
            harness.delete(f"/v1/allocations/{one['id']}")
            gone.append(told(one, "gone"))
    agent.report(*gone)
    plan = harness.get("/v1/defrag/plan?profile=7g.141gb&budget=8").json()
    assert plan["found"]
    assert plan["moves"]
    assert {move["node"] for move in plan["moves"]} == {"plain"}
    assert harness.post("/v1/defrag", {"moves": plan["moves"]}).status_code == 200


def test_a_reboot_is_handled_according_to_the_settings(tmp_path: Path) -> None:
    harness = Harness(tmp_path, settings={"agents_after_reboot": "fail"})
    try:
        agent = Agent(harness)
        agent.hello()
        made = harness.place("1g.18gb")
        agent.boot = "boot-2"
        agent.hello()
        seen = harness.get(f"/v1/allocations/{made['id']}").json()
        assert (seen["state"], seen["detail"]) == ("failed", "node gpu-07 was restarted")
    finally:
        harness.close()
