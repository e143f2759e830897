"""A node that is simulated in memory: a driver, a service, and an agent that can die at any step.

Small and readable on purpose: the fake driver is the faithful one, this is the one that runs
thousands of times. Every call and every write to disk is a *tick*; the process can be killed
before or after the effect of any of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from slicewise.agent.carrying import Carrier, Phase
from slicewise.agent.cdi import Cdi
from slicewise.agent.driver import (
    IN_USE,
    INVALID_STATE,
    NOT_FOUND,
    At,
    ComputeReading,
    DriverError,
    GpuReading,
    InstanceReading,
    ProfileReading,
    Usage,
)
from slicewise.agent.health import Health
from slicewise.agent.node import Node
from slicewise.agent.record import Record, Stage
from slicewise.agent.reporting import report
from slicewise.agent.seats import Seats
from slicewise.agent.wanted import Desired, Evicted, Wanted
from slicewise.catalog.library import Catalog

INSUFFICIENT = 23


class Killed(BaseException):
    """The agent's process is no more."""


class Ticks:
    """Counts what an agent does, and kills it, or lets a call fail, at the moment that was set."""

    def __init__(self) -> None:
        self.count = 0
        self.kill_at: set[int] = set()
        self.fail_at: dict[int, tuple[int, bool]] = {}
        """By tick: the code, and whether the work is done all the same."""

    def before(self, call: str) -> None:
        self.count += 1
        if self.count * 2 in self.kill_at:
            raise Killed(call)
        code, done = self.fail_at.get(self.count, (0, False))
        if code and not done:
            raise DriverError(code, call)

    def after(self, call: str) -> None:
        if self.count * 2 + 1 in self.kill_at:
            raise Killed(call)
        code, done = self.fail_at.get(self.count, (0, False))
        if code and done:
            raise DriverError(code, call)


@dataclass
class Hardware:
    """The GPUs, which outlive every agent."""

    gpus: dict[str, list[InstanceReading]]
    mig: dict[str, bool | None] = field(default_factory=dict)
    busy: set[tuple[str, int]] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    strangers: set[str] = field(default_factory=set)
    """UUIDs of instances the agent did not make."""
    serial: int = 0
    boot: int = 1

    @classmethod
    def of(cls, gpus: int = 1) -> Hardware:
        return cls({f"GPU-{number}": [] for number in range(gpus)})

    def profiles(self) -> tuple[ProfileReading, ...]:
        entry = Catalog.builtin().find("A30-24GB")
        geometry = entry.require()
        facts = {fact.name: fact for fact in entry.facts}
        return tuple(
            ProfileReading(
                facts[p.name].id or 0, p.name, p.size, p.compute, int(p.memory_gb * 1024),
                facts[p.name].max_instances or 0, p.starts,
            )
            for p in geometry.profiles
        )  # fmt: skip

    def add(self, gpu: str, profile_id: int, start: int, compute: bool) -> InstanceReading:
        offer = next(p for p in self.profiles() if p.id == profile_id)
        here = self.gpus[gpu]
        if start not in offer.starts or any(i.overlaps(start, offer.size) for i in here):
            raise DriverError(INSUFFICIENT, "create")
        free = next(n for n in range(100) if n not in {i.id for i in here})
        made = InstanceReading(free, offer.id, offer.name, start, offer.size)
        if compute:
            made = replace(made, compute=(ComputeReading(0, self.uuid()),))
        here.append(made)
        return made

    def uuid(self) -> str:
        self.serial += 1
        return f"MIG-{self.serial}"

    def stranger_makes(self, gpu: str, profile: str, start: int) -> bool:
        """Somebody makes an instance by hand; False where it does not fit."""
        offer = next(p for p in self.profiles() if p.name == profile)
        if self.mig.get(gpu, True) is not True:
            return False
        try:
            self.strangers.add(self.add(gpu, offer.id, start, True).uuid)
        except DriverError:
            return False
        return True

    def wipe(self, gpu: str) -> None:
        for instance in self.gpus[gpu]:
            self.strangers -= {c.uuid for c in instance.compute}
        self.gpus[gpu].clear()

    def reboot(self) -> None:
        self.boot += 1
        self.busy.clear()
        for gpu in self.gpus:
            self.wipe(gpu)

    @property
    def everything(self) -> list[tuple[str, InstanceReading]]:
        return [(gpu, i) for gpu, here in self.gpus.items() for i in here]


class SimulatedDriver:
    """The hardware as an agent's process sees it."""

    def __init__(self, hardware: Hardware, ticks: Ticks) -> None:
        self.hardware = hardware
        self.ticks = ticks
        self.xids: list[tuple[str, int]] = []
        self.readings = Usage(40, 0, 0)
        self.running: list[int] = []
        self.mig_status = 0
        self.pending: dict[str, bool] = {}
        self.names: dict[str, str] = {}

    def version(self) -> str:
        return "580.1"

    def gpus(self) -> list[str | DriverError]:
        self.ticks.before("gpus")
        return [gpu for gpu in self.hardware.gpus if gpu not in self.hardware.missing]

    def read(self, gpu: str) -> GpuReading:
        self.ticks.before("read")
        if gpu in self.hardware.missing or gpu not in self.hardware.gpus:
            raise DriverError(NOT_FOUND, "read")
        mig = self.hardware.mig.get(gpu, True)
        return GpuReading(
            uuid=gpu, index=list(self.hardware.gpus).index(gpu), name=self.names.get(gpu, "A30"),
            memory_mib=24 * 1024, minor=0, mig=mig, pending=self.pending.get(gpu, mig),
            profiles=() if mig is None else self.hardware.profiles(),
            instances=tuple(sorted(self.hardware.gpus[gpu], key=lambda i: i.start)) if mig else (),
        )  # fmt: skip

    def usage(self, gpu: str) -> Usage:
        return self.readings

    def events(self) -> list[tuple[str, int]]:
        events, self.xids = self.xids, []
        return events

    def processes(self, gpu: str) -> list[int]:
        return self.running

    def create_gpu_instance(self, gpu: str, profile_id: int, start: int, size: int) -> None:
        self.ticks.before("create_gpu_instance")
        self.hardware.add(gpu, profile_id, start, False)
        self.ticks.after("create_gpu_instance")

    def create_compute_instance(self, at: At) -> None:
        self.ticks.before("create_compute_instance")
        found = self._find(at)
        if found.compute:
            raise DriverError(INSUFFICIENT, "create_compute_instance")
        self._replace(at.gpu, found, (ComputeReading(0, self.hardware.uuid()),))
        self.ticks.after("create_compute_instance")

    def destroy_compute_instance(self, at: At, compute: ComputeReading) -> None:
        self.ticks.before("destroy_compute_instance")
        found = self._find(at)
        if compute not in found.compute:
            raise DriverError(INVALID_STATE, "destroy_compute_instance")
        if (at.gpu, at.start) in self.hardware.busy:
            raise DriverError(IN_USE, "destroy_compute_instance")
        self.hardware.strangers -= {compute.uuid}
        self._replace(at.gpu, found, tuple(c for c in found.compute if c != compute))
        self.ticks.after("destroy_compute_instance")

    def destroy_gpu_instance(self, at: At) -> None:
        self.ticks.before("destroy_gpu_instance")
        found = self._find(at)
        if found.compute:
            raise DriverError(IN_USE, "destroy_gpu_instance")
        self.hardware.gpus[at.gpu].remove(found)
        self.ticks.after("destroy_gpu_instance")

    def enable_mig(self, gpu: str) -> None:
        if self.mig_status:
            self.pending[gpu] = True
            raise DriverError(self.mig_status, "enable_mig")
        self.hardware.mig[gpu] = True

    def reopen(self) -> None: ...

    def close(self) -> None: ...

    def _find(self, at: At) -> InstanceReading:
        for there in self.hardware.gpus[at.gpu]:
            if (there.id, there.profile_id, there.start) == (at.id, at.profile_id, at.start):
                return there
        raise DriverError(INVALID_STATE, "find")

    def _replace(
        self, gpu: str, old: InstanceReading, compute: tuple[ComputeReading, ...]
    ) -> None:  # fmt: skip
        here = self.hardware.gpus[gpu]
        here[here.index(old)] = replace(old, compute=compute)


@dataclass
class Office:
    """A service as the contract has it: what it wants, and what it was told."""

    wanted: dict[tuple[str, int], Wanted] = field(default_factory=dict)
    evict: list[Evicted] = field(default_factory=list)
    told: dict[str, object] = field(default_factory=dict)
    phases: dict[tuple[str, int], dict[str, object]] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    released: set[tuple[str, int]] = field(default_factory=set)

    def desired(self) -> Desired:
        return Desired(1, tuple(self.wanted.values()), tuple(self.evict))

    def place(self, allocation: str, gpu: str, profile: str, start: int, size: int) -> None:
        item = Wanted(allocation, 0, gpu, profile, start, size, True)
        self.wanted[item.part] = item

    def release(self, allocation: str) -> None:
        self.wanted[allocation, 0] = replace(self.wanted[allocation, 0], present=False)

    def hear(self, told: dict[str, object]) -> bool:
        """Take a report in; says whether what is wanted has changed."""
        before = self.desired()
        self.told = told
        instances = told["instances"]
        assert isinstance(instances, list)
        for one in instances:
            part = (one["allocation"], one["index"])
            item = self.wanted.get(part)
            if item is None:
                continue
            self.phases[part] = one
            if one["phase"] == "active":
                self.wanted[part] = replace(item, uuid=one["uuid"])
            elif one["phase"] == "failed":
                self.failures[part] = one["detail"]
                self.wanted[part] = replace(item, present=False)
            elif one["phase"] == "gone" and not item.present:
                del self.wanted[part]
                self.released.add(part)
        foreign = told["foreign"]
        assert isinstance(foreign, list)
        there = {(f["gpu"], f["profile"], f["start"], f["uuid"]) for f in foreign}
        self.evict = [e for e in self.evict if (e.gpu, e.profile, e.start, e.uuid) in there]
        return self.desired() != before

    def forget_uuids(self) -> None:
        """As the service does when the boot id has changed: all stays wanted."""
        self.wanted = {part: replace(item, uuid="") for part, item in self.wanted.items()}

    def blocked(self, gpu: str, start: int, size: int) -> bool:
        """Whether the scheduler would place nothing there."""
        foreign = self.told.get("foreign", [])
        assert isinstance(foreign, list)
        taken = [(f["gpu"], f["start"], f["size"]) for f in foreign]
        taken += [(w.gpu, w.start, w.size) for w in self.wanted.values()]
        return any(g == gpu and s < start + size and start < s + n for g, s, n in taken)


class World:
    """A node, its service, and the agent between them; only the agent dies."""

    def __init__(self, folder: Path, gpus: int = 1, cdi: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.hardware = Hardware.of(gpus)
        self.office = Office()
        self.ticks = Ticks()
        self.driver = SimulatedDriver(self.hardware, self.ticks)
        self.now = 0.0
        self.deaths = 0
        self.failed_look = False
        self.cdi = Cdi(folder / "cdi", "580.1", folder) if cdi else None
        self.reboots = self.hardware.boot
        self.start()

    def start(self) -> None:
        """A new process of the agent: it knows what is on disk."""
        boot = str(self.hardware.boot)
        if self.reboots != self.hardware.boot:
            self.reboots = self.hardware.boot
            self.office.forget_uuids()
        node = Node(self.driver, Seats(self.folder), Health(self.folder, boot))
        record = Record(self.folder, boot)
        self.carrier = Carrier(node, record, self.cdi, lambda: self.now, random.Random(1))

    def turn(self) -> None:
        """Look, work, report; killed or not. What the service then wants is known next time."""
        try:
            self.carrier.take(self.office.desired())
            self.carrier.node.look()
            self.carrier.round(True)
            self.office.hear(report(self.carrier.node, self.carrier))
        except Killed:
            self.deaths += 1
            self.start()
        except DriverError:
            self.failed_look = True  # Another one follows.
        due = self.carrier.due()
        self.now = max(self.now + 10.0, min(due, self.now + 400.0))

    def settle(self, most: int = 60) -> None:
        """Go on until nothing changes any more."""
        for _ in range(most):
            before = (self.deaths, self.state())
            self.failed_look = False
            self.turn()
            if self.deaths != before[0] or self.failed_look:
                continue
            calm = all(
                self.carrier.standing(item).phase in (Phase.ACTIVE, Phase.GONE, None)
                for item in self.carrier.desired.instances
            )
            if calm and before[1] == self.state() and not self.office.evict:
                return

    def state(self) -> object:
        return (repr(self.hardware.everything), repr(self.office.desired()))

    def check(self) -> None:
        """The hardware is what is wanted, strangers' instances are as they were, no more."""
        left = dict(self.office.wanted)
        for gpu, there in self.hardware.everything:
            if there.uuid in self.hardware.strangers:
                continue
            items = [w for w in left.values() if w.key == (gpu, there.profile, there.start)]
            assert len(items) == 1, f"{there} on {gpu} is nobody's"
            assert items[0].present
            assert items[0].uuid == there.uuid != ""
            del left[items[0].part]
        assert not left, f"wanted, but not there: {left}"
        stages = {own.stage for own in self.carrier.record}
        assert stages <= {Stage.WHOLE}
        if self.cdi is not None:
            files = {p.name for p in self.cdi.folder.glob("*.json")}
            assert files == {
                f"slicewise.dev-mig-{w.uuid}.json" for w in self.office.wanted.values()
            }
