"""A plain model of a node with an agent: hardware as a list, an agent that errs in every way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.control.office import Office

from slicewise import load_geometry
from slicewise.control.agent_wire import DesiredView, HelloBody, ReportBody
from slicewise.control.commands import Hello, Report
from slicewise.control.geometries import record_of
from slicewise.control.views import desired_view

H200 = load_geometry("H200-141GB")
H200_RECORD = record_of(H200)


@dataclass
class Thing:
    """An instance on the hardware."""

    gpu: str
    profile: str
    start: int
    size: int
    uuid: str
    busy: bool = False
    strange: bool = False
    """Whether somebody else than the agent made it."""

    @property
    def place(self) -> tuple[str, str, int]:
        return self.gpu, self.profile, self.start

    def slices(self) -> set[tuple[str, int]]:
        return {(self.gpu, number) for number in range(self.start, self.start + self.size)}


@dataclass
class Box:
    """A node: what is on it, what its agent remembers, and what it last heard."""

    name: str
    gpus: list[str]
    rng: random.Random
    boot: int = 1
    things: list[Thing] = field(default_factory=list)
    record: dict[tuple[str, str, int], tuple[str, int]] = field(default_factory=dict)
    """By place: the allocation and index for which the agent made an instance there."""
    session: str = ""
    heard: DesiredView | None = None
    off: set[str] = field(default_factory=set)
    sick: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    said: list[ReportBody] = field(default_factory=list)
    given_up: set[tuple[str, int]] = field(default_factory=set)
    made: int = 0
    met: set[str] = field(default_factory=set)
    """UUIDs of what somebody else had made when the session began."""

    # The hardware

    def room(self, gpu: str, profile: str, start: int) -> bool:
        kind = H200.profile(profile)
        wanted = {(gpu, number) for number in range(start, start + kind.size)}
        there = [thing for thing in self.things if thing.gpu == gpu]
        media = sum(thing.profile.endswith("+me") for thing in there)
        compute = sum(H200.profile(thing.profile).compute for thing in there)
        return (
            not any(wanted & thing.slices() for thing in there)
            and not (profile.endswith("+me") and media)
            and compute + kind.compute <= H200.compute
        )

    def create(self, gpu: str, profile: str, start: int) -> Thing | None:
        if gpu in self.off | self.removed or not self.room(gpu, profile, start):
            return None
        self.made += 1
        uuid = f"MIG-{self.name}-{self.boot}-{self.made}"
        thing = Thing(gpu, profile, start, H200.profile(profile).size, uuid)
        self.things.append(thing)
        return thing

    def somebody_creates(self) -> None:
        placement = self.rng.choice(H200.placements)
        made = self.create(self.rng.choice(self.gpus), placement.profile.name, placement.start)
        if made is not None:
            made.strange = True

    def somebody_destroys(self) -> None:
        strangers = [thing for thing in self.things if thing.strange]
        if strangers:
            self.things.remove(self.rng.choice(strangers))

    def reboot(self) -> None:
        self.boot += 1
        self.things.clear()
        self.record.clear()  # of another boot: nothing in it counts
        self.session = ""
        self.heard = None

    # The agent

    def hello(self, office: Office, fail: bool = False) -> int:
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
        status, answer = office.ask(command)
        if status == 200:
            self.session = answer["session"]
            self.met = {thing.uuid for thing in self.things if thing.strange}
            self.heard = None
            self.given_up.clear()
        return status

    def _gpu(self, gpu: str) -> dict[str, Any]:
        problem = "it is sick" if gpu in self.sick else ""
        return {"uuid": gpu, "mig": gpu not in self.off, "problem": problem}

    def listen(self, office: Office) -> None:
        node = office.state.nodes.get(self.name)
        if node is not None and node.agent is not None and node.agent.session == self.session:
            self.heard = desired_view(office.state, node, node.agent)
            known = {thing.uuid: thing for thing in self.things}
            for one in self.heard.instances:
                if one.uuid in known:  # it was forgotten, or adopted: it is ours
                    self.record[known[one.uuid].place] = one.allocation, one.index

    def work(self, faults: float) -> None:
        """Do some of what was heard; anything may fail."""
        if self.heard is None:
            return
        for one in self.heard.instances:
            if self.rng.random() < faults:
                continue
            place = one.gpu, one.profile, one.start
            own = self.record.get(place) == (one.allocation, one.index)
            there = next((thing for thing in self.things if thing.place == place), None)
            if one.wanted == "present":
                if not (own and there) and (one.allocation, one.index) not in self.given_up:
                    if self.create(*place) is None:
                        self.given_up.add((one.allocation, one.index))
                    else:
                        self.record[place] = one.allocation, one.index
            elif own and there is not None and not there.busy and one.gpu not in self.removed:
                self.things.remove(there)
                del self.record[place]
        for order in self.heard.evict:
            self.things = [
                thing
                for thing in self.things
                if (thing.gpu, thing.uuid) != (order.gpu, order.uuid) or thing.place in self.record
            ]

    def report(self) -> ReportBody:
        """All that the agent sees."""
        visible = {thing.place: thing for thing in self.things if thing.gpu not in self.removed}
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
                continue  # nobody can know
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
            if self._is_nobodys(thing)
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

    def _is_nobodys(self, thing: Thing) -> bool:
        owner = self.record.get(thing.place)
        listed = {(one.allocation, one.index) for one in self.heard.instances} if self.heard else ()
        return owner not in listed

    def tell(self, office: Office, report: ReportBody) -> int:
        return office.ask(Report(self.name, report))[0]
