"""A simple model of a managed node: a list of instances, and an agent that fails in every way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.control.control_plane import ControlPlane

from slicewise import load_geometry
from slicewise.api.agents import DesiredView, HelloBody, ReportBody
from slicewise.control.commands import Hello, Report
from slicewise.control.geometries import record_of
from slicewise.control.views import desired_view

H200 = load_geometry("H200-141GB")
H200_RECORD = record_of(H200)


@dataclass
class FakeInstance:
    """An instance on the hardware."""

    gpu: str
    profile: str
    start: int
    size: int
    uuid: str
    busy: bool = False
    foreign: bool = False
    """Whether another program than the agent created it."""

    @property
    def place(self) -> tuple[str, str, int]:
        return self.gpu, self.profile, self.start

    def slices(self) -> set[tuple[str, int]]:
        return {(self.gpu, number) for number in range(self.start, self.start + self.size)}


@dataclass
class FakeNode:
    """A node: its instances, its agent's record, and the last desired state."""

    name: str
    gpus: list[str]
    rng: random.Random
    boot: int = 1
    instances: list[FakeInstance] = field(default_factory=list)
    record: dict[tuple[str, str, int], tuple[str, int]] = field(default_factory=dict)
    """The allocation and index of each instance that the agent created, by place."""
    session: str = ""
    heard: DesiredView | None = None
    off: set[str] = field(default_factory=set)
    sick: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    said: list[ReportBody] = field(default_factory=list)
    given_up: set[tuple[str, int]] = field(default_factory=set)
    made: int = 0
    met: set[str] = field(default_factory=set)
    """UUIDs of foreign instances that existed when the session began."""

    # The hardware

    def room(self, gpu: str, profile: str, start: int) -> bool:
        kind = H200.profile(profile)
        wanted = {(gpu, number) for number in range(start, start + kind.size)}
        there = [thing for thing in self.instances if thing.gpu == gpu]
        media = sum(thing.profile.endswith("+me") for thing in there)
        compute = sum(H200.profile(thing.profile).compute for thing in there)
        return (
            not any(wanted & thing.slices() for thing in there)
            and not (profile.endswith("+me") and media)
            and compute + kind.compute <= H200.compute
        )

    def create(self, gpu: str, profile: str, start: int) -> FakeInstance | None:
        if gpu in self.off | self.removed or not self.room(gpu, profile, start):
            return None
        self.made += 1
        uuid = f"MIG-{self.name}-{self.boot}-{self.made}"
        thing = FakeInstance(gpu, profile, start, H200.profile(profile).size, uuid)
        self.instances.append(thing)
        return thing

    def create_foreign(self) -> None:
        placement = self.rng.choice(H200.placements)
        made = self.create(self.rng.choice(self.gpus), placement.profile.name, placement.start)
        if made is not None:
            made.foreign = True

    def destroy_foreign(self) -> None:
        strangers = [thing for thing in self.instances if thing.foreign]
        if strangers:
            self.instances.remove(self.rng.choice(strangers))

    def reboot(self) -> None:
        self.boot += 1
        self.instances.clear()
        self.record.clear()  # it belongs to another boot
        self.session = ""
        self.heard = None

    # The agent

    def hello(self, control: ControlPlane, fail: bool = False) -> int:
        body = {
            "boot": f"boot-{self.boot}",
            "agent": "1",
            "driver": "580",
            "model": H200.model,
            "geometry": msgspec.to_builtins(H200_RECORD),
            "gpus": [self._gpu(gpu) for gpu in self.gpus if gpu not in self.removed],
        }
        if not body["gpus"]:
            return 0
        command = Hello(self.name, msgspec.convert(body, HelloBody), H200_RECORD, fail)
        status, answer = control.ask(command)
        if status == 200:
            self.session = answer["session"]
            self.met = {thing.uuid for thing in self.instances if thing.foreign}
            self.heard = None
            self.given_up.clear()
        return status

    def _gpu(self, gpu: str) -> dict[str, Any]:
        problem = "it is sick" if gpu in self.sick else ""
        return {"uuid": gpu, "mig": gpu not in self.off, "problem": problem}

    def listen(self, control: ControlPlane) -> None:
        node = control.state.nodes.get(self.name)
        if node is not None and node.agent is not None and node.agent.session == self.session:
            self.heard = desired_view(control.state, node, node.agent)
            known = {thing.uuid: thing for thing in self.instances}
            for one in self.heard.instances:
                if one.uuid in known:  # adopted, or missing from the record
                    self.record[known[one.uuid].place] = one.allocation, one.index

    def work(self, faults: float) -> None:
        """Apply some of the desired state; any step may fail."""
        if self.heard is None:
            return
        for one in self.heard.instances:
            if self.rng.random() < faults:
                continue
            place = one.gpu, one.profile, one.start
            own = self.record.get(place) == (one.allocation, one.index)
            there = next((thing for thing in self.instances if thing.place == place), None)
            if one.wanted == "present":
                if not (own and there) and (one.allocation, one.index) not in self.given_up:
                    if self.create(*place) is None:
                        self.given_up.add((one.allocation, one.index))
                    else:
                        self.record[place] = one.allocation, one.index
            elif own and there is not None and not there.busy and one.gpu not in self.removed:
                self.instances.remove(there)
                del self.record[place]
        for order in self.heard.evict:
            self.instances = [
                thing
                for thing in self.instances
                if (thing.gpu, thing.uuid) != (order.gpu, order.uuid) or thing.place in self.record
            ]

    def report(self) -> ReportBody:
        """Return a complete report."""
        visible = {thing.place: thing for thing in self.instances if thing.gpu not in self.removed}
        instances: list[dict[str, Any]] = []
        for one in self.heard.instances if self.heard is not None else ():
            place = one.gpu, one.profile, one.start
            which = one.allocation, one.index
            thing = visible.get(place) if self.record.get(place) == which else None
            said: dict[str, Any] = {"allocation": one.allocation, "index": one.index}
            if one.wanted == "present":
                if thing is not None:
                    said |= {"phase": "active", "uuid": thing.uuid}
                elif which in self.given_up:
                    said |= {"phase": "failed", "detail": "no room"}
                else:
                    said |= {"phase": "creating", "attempts": self.rng.randrange(3)}
            elif thing is not None:
                said |= {"phase": "quarantined" if thing.busy else "releasing", "uuid": thing.uuid}
            elif one.gpu in self.removed:
                continue  # unknown
            else:
                said |= {"phase": "gone"}
            instances.append(said)
        foreign = [
            {
                "gpu": thing.gpu,
                "uuid": thing.uuid,
                "profile": thing.profile,
                "start": thing.start,
                "size": thing.size,
                "why": "stray" if thing.place in self.record else "foreign",
            }
            for thing in visible.values()
            if self._is_foreign(thing)
        ]
        body = {
            "session": self.session,
            "gpus": [self._gpu(gpu) for gpu in self.gpus if gpu not in self.removed],
            "instances": instances,
            "foreign": foreign,
        }
        made = msgspec.convert(body, ReportBody)
        self.said.append(made)
        return made

    def _is_foreign(self, thing: FakeInstance) -> bool:
        owner = self.record.get(thing.place)
        listed = {(one.allocation, one.index) for one in self.heard.instances} if self.heard else ()
        return owner not in listed

    def tell(self, control: ControlPlane, report: ReportBody) -> int:
        return control.ask(Report(self.name, report))[0]
