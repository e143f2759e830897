"""Agents over HTTP: hello, what should be there, reports, and what operators decide."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.service.house import House

from slicewise import load_geometry
from slicewise.control.geometries import record_of
from slicewise.control.wire import encode
from slicewise.service.auth import Caller
from slicewise.service.devices import gpu_views

GEOMETRY = msgspec.to_builtins(record_of(load_geometry("H200-141GB")))
GPUS = ("GPU-0", "GPU-1")


class Agent:
    """Somebody who speaks for a node."""

    def __init__(self, house: House, node: str = "gpu-07", gpus: tuple[str, ...] = GPUS) -> None:
        self.house = house
        self.node = node
        self.gpus = gpus
        self.token = house.token("agent", node=node)
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
        """Begin a session; unless told otherwise, with a report that nothing is there."""
        body = self.body(**changes)
        answer = self.house.post("/v1/agent/hello", body, token=self.token)
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
        answer = self.house.get(self.path(wait), token=self.token)
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
        answer = self.house.post("/v1/agent/report", body, token=self.token)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def agent(house: House) -> Agent:
    made = Agent(house)
    made.hello()
    return made


def told(one: dict[str, Any], phase: str, **more: Any) -> dict[str, Any]:
    return {"allocation": one["id"], "index": 0, "phase": phase} | more


def test_an_instance_from_placed_to_gone(house: House, agent: Agent) -> None:
    node = house.get("/v1/nodes/gpu-07").json()
    assert (node["managed"], node["gpus"], node["model"]) == (True, 2, "H200-141GB")
    assert agent.desired() == []
    made = house.place("1g.18gb")
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
    }
    agent.report(told(made, "creating", attempts=1, detail="driver busy"))
    seen = house.get(f"/v1/allocations/{made['id']}").json()
    assert (seen["state"], seen["attempts"]) == ("creating", 1)
    assert seen["instances"][0]["detail"] == "driver busy"
    agent.report(told(made, "active", uuid="MIG-1"))
    seen = house.get(f"/v1/allocations/{made['id']}").json()
    assert seen["state"] == "active"
    assert seen["env"] == seen["instances"][0]["env"] == "CUDA_VISIBLE_DEVICES=MIG-1"
    assert seen["cdi"] == seen["instances"][0]["cdi"] == "slicewise.dev/mig=MIG-1"
    before = house.service.plant.state.seq
    agent.report(told(made, "active", uuid="MIG-1"))
    assert house.service.plant.state.seq == before, "nothing new was written"

    ended = house.delete(f"/v1/allocations/{made['id']}").json()
    assert (ended["state"], ended["phase"]) == ("releasing", "releasing")
    assert house.get("/v1/tenants/default").json()["usage"]["instances"] == 0
    (unwanted,) = agent.desired()
    assert (unwanted["wanted"], unwanted["uuid"]) == ("absent", "MIG-1")
    assert house.get("/v1/nodes/gpu-07").json()["free_slices"] == 15
    (listed,) = house.get("/v1/allocations?state=releasing").json()["allocations"]
    assert listed["id"] == made["id"]
    assert house.get("/v1/allocations?state=released").json()["allocations"] == []
    agent.report(told(made, "gone"))
    assert house.get("/v1/nodes/gpu-07").json()["free_slices"] == 16
    seen = house.get(f"/v1/allocations/{made['id']}").json()
    assert (seen["state"], seen["phase"], seen["env"]) == ("released", "gone", "")
    (listed,) = house.get("/v1/allocations?state=released").json()["allocations"]
    assert listed["id"] == made["id"]
    assert agent.desired() == []


def test_a_node_takes_nothing_before_its_agent_has_reported(house: House) -> None:
    agent = Agent(house, gpus=("GPU-0",))
    agent.hello(reports=False)
    why = {"unreported": "its agent has not said yet what is there"}
    assert house.get("/v1/nodes/gpu-07").json()["holds"] == why
    body = {"profile": "3g.71gb"}
    refused = house.post("/v1/allocations", body)
    assert (refused.status_code, refused.json()["reason"]) == (409, "capacity")
    waits = house.post("/v1/allocations", body | {"wait_seconds": 600})
    assert waits.status_code == 202
    assert agent.desired() == [], "a poll is no report"
    assert house.get("/v1/nodes/gpu-07").json()["holds"] == why
    stranger = {"gpu": "GPU-0", "uuid": "MIG-x", "profile": "3g.71gb", "start": 4, "size": 4}
    agent.report(foreign=[stranger])
    assert house.get("/v1/nodes/gpu-07").json()["holds"] == {}
    (wanted,) = agent.desired()
    assert (wanted["allocation"], wanted["start"]) == (waits.json()["id"], 0)


def test_a_poll_is_answered_when_something_changes(house: House, agent: Agent) -> None:
    agent.desired()

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(house.service.app)
        own = {"authorization": f"Bearer {agent.token}"}
        admin = {"authorization": f"Bearer {house.admin}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://house") as client:
            poll = asyncio.create_task(client.get(agent.path(60), headers=own))
            while not house.service.site.contacts.waiting:
                await asyncio.sleep(0.001)
            made = await client.post("/v1/allocations", json={"profile": "2g.35gb"}, headers=admin)
            return await poll, made

    poll, made = house.run(ask())
    assert poll.status_code == 200
    (wanted,) = poll.json()["instances"]
    assert wanted["allocation"] == made.json()["id"]
    assert house.service.site.contacts.waiting == 0


async def _poll(house: House, agent: Agent, wait: int, then: Any) -> httpx.Response:
    """A poll, and something that happens once it is open."""
    transport = httpx.ASGITransport(house.service.app)
    headers = {"authorization": f"Bearer {agent.token}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://house") as client:
        poll = asyncio.create_task(client.get(agent.path(wait), headers=headers))
        while not house.service.site.contacts.waiting:
            await asyncio.sleep(0.001)
        await then()
        return await poll


def test_a_poll_ends_without_news(house: House, agent: Agent) -> None:
    agent.desired()
    before = agent.seq
    assert agent.desired(wait=1) == []
    assert agent.seq == before
    agent.seq = 10**9  # from a journal that nobody has any more
    assert agent.desired(wait=60) == []
    assert agent.seq == before


def test_a_poll_is_answered_at_once_when_the_process_stops(house: House, agent: Agent) -> None:
    agent.desired()

    async def stop() -> None:
        house.service.close_streams()

    answer = house.run(_poll(house, agent, 60, stop))
    assert answer.status_code == 503
    assert "stopping" in answer.json()["detail"]


def test_a_poll_is_answered_at_once_when_another_leads(house: House, agent: Agent) -> None:
    agent.desired()

    async def resign() -> None:
        await house.service.plant.in_thread(house.service.plant.leave_office)

    answer = house.run(_poll(house, agent, 60, resign))
    assert answer.status_code == 503


def test_a_standby_tells_agents_where_to_go(house: House, agent: Agent) -> None:
    other = house.open("second")
    assert not other.plant.leads
    answer = house.call("GET", agent.path(0), token=agent.token, service=other)
    assert answer.status_code == 503
    assert answer.json()["leader"] == "http://first"


def test_an_agent_that_hangs_up_is_not_waited_for(house: House, agent: Agent) -> None:
    agent.desired()

    async def leave() -> None:
        async with house.stream(agent.path(60), agent.token) as reader:
            while not house.service.site.contacts.waiting:
                await asyncio.sleep(0.001)
        assert reader.status == 0

    house.run(leave())
    assert house.service.site.contacts.waiting == 0


def test_an_open_poll_of_an_old_session_is_told_so(house: House, agent: Agent) -> None:
    agent.desired()
    other = Agent(house)

    async def join() -> None:
        transport = httpx.ASGITransport(house.service.app)
        headers = {"authorization": f"Bearer {other.token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://house") as client:
            said = await client.post("/v1/agent/hello", json=other.body(), headers=headers)
            assert said.status_code == 200

    answer = house.run(_poll(house, agent, 60, join))
    assert answer.status_code == 409
    assert answer.json()["reason"] == "superseded"
    assert agent.report(status=409)["reason"] == "superseded"


def test_an_agent_speaks_for_its_own_node_only(house: House, agent: Agent) -> None:
    other = Agent(house, "gpu-08")
    assert house.get("/v1/nodes/gpu-07", token=other.token).status_code == 404
    other.session = agent.session
    assert other.report(status=409)["reason"] == "unknown"
    other.hello(gpus=[{"uuid": "GPU-9", "mig": True}])
    made = house.place("1g.18gb", models=["H200-141GB"])
    mine, theirs = (agent, other) if made["node"] == agent.node else (other, agent)
    theirs.report(told(made, "failed"))
    assert house.get(f"/v1/allocations/{made['id']}").json()["state"] == "placed"
    mine.report(told(made, "failed", detail="no luck"))
    failed = house.get(f"/v1/allocations/{made['id']}").json()
    assert (failed["state"], failed["cause"]) == ("failed", "failed")
    assert failed["detail"].endswith("could not be made: no luck")
    mine.report(told(made, "gone"))
    (listed,) = house.get("/v1/allocations?state=failed").json()["allocations"]
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
def test_a_hello_that_cannot_be_is_refused(
    house: House, changes: dict[str, Any], field: str | None
) -> None:
    said = Agent(house).hello(status=400, **changes)
    assert field is None or said["field"].startswith(field)


def test_a_report_that_cannot_be_is_refused(house: House, agent: Agent) -> None:
    made = house.place("1g.18gb")
    said = agent.report(told(made, "active"), status=400)
    assert said["field"] == "instances[0].uuid"
    assert agent.report(told(made, "flying"), status=400)["status"] == 400


def test_a_lost_agent_holds_its_node_until_it_is_heard_of(house: House, agent: Agent) -> None:
    contacts, state = house.service.site.contacts, house.service.plant.state
    made = house.place("1g.18gb")
    house.clock.now += 89
    contacts.watch()
    house.clock.now += 2
    contacts.watch()
    house.wait_for(lambda: "unknown" in state.nodes["gpu-07"].holds)
    contacts.watch()
    view = house.get("/v1/nodes/gpu-07").json()
    assert view["agent"]["reachable"] is False
    assert "2023-11-14T22:13:20" in view["holds"]["unknown"]
    assert house.post("/v1/allocations", {"profile": "1g.18gb"}).status_code == 409
    assert [one["allocation"] for one in agent.desired()] == [made["id"]]
    assert state.nodes["gpu-07"].holds == {}
    view = house.get("/v1/nodes/gpu-07").json()
    assert view["agent"]["reachable"] is True
    assert view["agent"]["last_contact"].startswith("2023-11-14T22:14:51")

    # Lost while it was being heard of: it is let go of at the next look.
    house.clock.now += 91
    contacts.watch()
    contacts.touch("gpu-07")
    house.wait_for(lambda: "unknown" in state.nodes["gpu-07"].holds)
    contacts.watch()
    house.wait_for(lambda: not state.nodes["gpu-07"].holds)

    # An open poll is contact, however long it takes.
    async def long_after() -> None:
        house.clock.now += 1000
        contacts.watch()
        house.clock.now += 1
        house.service.close_streams()

    seq = state.seq
    house.run(_poll(house, agent, 60, long_after))
    assert state.seq == seq


def test_a_new_leader_begins_to_count_anew(house: House, agent: Agent) -> None:
    contacts, state = house.service.site.contacts, house.service.plant.state
    house.clock.now += 80
    contacts.begin()
    house.clock.now += 80
    assert contacts.reachable("gpu-07")
    house.clock.now += 20
    contacts.watch()
    house.wait_for(lambda: "unknown" in state.nodes["gpu-07"].holds)
    contacts.begin()
    assert not contacts.reachable("gpu-07"), "held until it is really heard of"
    contacts.watch()
    agent.report()
    assert state.nodes["gpu-07"].holds == {}


def test_nobody_is_watched_where_nobody_leads(house: House, agent: Agent) -> None:
    house.clock.now += 1000
    house.service.close_streams()
    house.service.site.contacts.watch()
    assert house.service.plant.writer is not None
    assert house.service.plant.writer.waiting == 0


def test_what_an_agent_tells_is_shown(house: House, agent: Agent) -> None:
    made = house.place("1g.18gb")
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
    view = house.get("/v1/nodes/gpu-07").json()
    assert (view["foreign"], view["held_gpus"], view["instances"]) == (1, 1, 1)
    assert (view["agent"]["driver"], view["agent"]["version"]) == ("580.65.06", "0.1.0")
    good, bad = view["devices"][made["gpu"]], view["devices"][other]
    assert (good["temperature"], good["memory_used"], good["mig"]) == (41, 5, True)
    assert good["instances"][0]["phase"] == "active"
    assert good["instances"][0]["memory_used"] == 123
    assert bad["holds"] == {"mig": "MIG mode is off", "problem": "too hot"}
    assert (bad["mig"], bad["foreign"][0]["name"]) == (False, "MIG-x")
    assert bad["instances"][0]["phase"] == "foreign"
    tenant = house.tenant("acme")
    seen = house.get("/v1/nodes/gpu-07", token=tenant).json()
    assert seen["devices"][other]["foreign"] == []
    assert seen["devices"][made["gpu"]]["instances"][0]["memory_used"] is None

    # The same, slice by slice, where all GPUs are shown at once.
    state = house.service.plant.state
    ended = house.place("1g.18gb")
    house.delete(f"/v1/allocations/{ended['id']}")
    node = state.nodes["gpu-07"]
    caller = Caller(next(iter(state.tokens.values())))
    shown = house.get("/v1/cluster?gpus=true").json()["devices"]
    assert shown == json.loads(encode(gpu_views(state, node, caller)))

    text = house.get("/metrics").text
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


def test_what_operators_decide(house: House, agent: Agent) -> None:
    stranger = {"gpu": "GPU-0", "uuid": "MIG-x", "profile": "1g.18gb", "start": 0, "size": 1}
    agent.report(foreign=[stranger, stranger | {"uuid": "MIG-y", "start": 1}])
    house.tenant("acme")
    path = "/v1/nodes/gpu-07/foreign"
    made = house.post(f"{path}/MIG-x/adopt", {"tenant": "acme"})
    assert made.status_code == 201
    assert (made.json()["tenant"], made.json()["env"]) == ("acme", "CUDA_VISIBLE_DEVICES=MIG-x")
    gone = house.post(f"{path}/MIG-y/evict")
    assert (gone.status_code, gone.json()["evicting"]) == (202, True)
    answer = house.get(agent.path(0), token=agent.token).json()
    assert answer["evict"] == [{"gpu": "GPU-0", "uuid": "MIG-y", "profile": "1g.18gb", "start": 1}]
    assert house.post(f"{path}/MIG-z/evict").status_code == 404
    assert house.post("/v1/nodes/gpu-07/accept").json()["reason"] == "agreed"


def test_plans_leave_managed_nodes_alone(house: House, agent: Agent) -> None:
    house.node(name="plain", model="H200-141GB", gpus=2)
    made = [house.place("1g.18gb") for _ in range(28)]
    for one in made:
        agent.report(*([told(one, "active", uuid=f"MIG-{one['id']}")] if "uuid" in one else []))
    on_gpu: dict[tuple[str, int], list[Any]] = {}
    for one in made:
        on_gpu.setdefault((one["node"], one["gpu"]), []).append(one)
    gone = []
    for here in on_gpu.values():
        for one in here[:-2]:
            house.delete(f"/v1/allocations/{one['id']}")
            gone.append(told(one, "gone"))
    agent.report(*gone)
    plan = house.get("/v1/defrag/plan?profile=7g.141gb&budget=8").json()
    assert plan["found"]
    assert plan["moves"]
    assert {move["node"] for move in plan["moves"]} == {"plain"}
    assert house.post("/v1/defrag", {"moves": plan["moves"]}).status_code == 200


def test_restarts_are_dealt_with_as_the_settings_say(tmp_path: Path) -> None:
    house = House(tmp_path, settings={"agents_after_reboot": "fail"})
    try:
        agent = Agent(house)
        agent.hello()
        made = house.place("1g.18gb")
        agent.boot = "boot-2"
        agent.hello()
        seen = house.get(f"/v1/allocations/{made['id']}").json()
        assert (seen["state"], seen["detail"]) == ("failed", "node gpu-07 was restarted")
    finally:
        house.close()
