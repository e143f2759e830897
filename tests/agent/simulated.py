"""A node simulated in memory: a driver, a service, and an agent that can be killed at any step.

It is small and fast, so tests run it thousands of times; the fake driver is the faithful
simulation. Every driver call and every write to disk is a step. The agent can be killed before or
after the effect of any step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from slicewise.agent.cdi import Cdi
from slicewise.agent.desired_state import Desired, DesiredInstance, Eviction
from slicewise.agent.driver import (
    IN_USE,
    INVALID_STATE,
    NOT_FOUND,
    ComputeReading,
    DriverError,
    GpuReading,
    GpuUsage,
    InstanceReading,
    InstanceRef,
    ProfileReading,
)
from slicewise.agent.health import Health
from slicewise.agent.node_state import GpuIndex, NodeState
from slicewise.agent.reconciler import Phase, Reconciler
from slicewise.agent.record import Record, Stage
from slicewise.agent.reports import report
from slicewise.catalog.library import Catalog

INSUFFICIENT = 23


class Killed(BaseException):
    """Raised in place of a kill of the agent's process."""


class Steps:
    """Counts the steps of an agent, and kills it or fails a call at given steps."""

    def __init__(self) -> None:
        self.count = 0
        self.kill_at: set[int] = set()
        self.fail_at: dict[int, tuple[int, bool]] = {}
        """By step: the error code, and whether the call takes effect nevertheless."""

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
    """The GPUs, which outlive agents."""

    gpus: dict[str, list[InstanceReading]]
    mig: dict[str, bool | None] = field(default_factory=dict)
    busy: set[tuple[str, int]] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    """UUIDs of foreign instances."""
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

    def create_foreign(self, gpu: str, profile: str, start: int) -> bool:
        """Create a foreign instance; return False if it does not fit."""
        offer = next(p for p in self.profiles() if p.name == profile)
        if self.mig.get(gpu, True) is not True:
            return False
        try:
            self.foreign.add(self.add(gpu, offer.id, start, True).uuid)
        except DriverError:
            return False
        return True

    def wipe(self, gpu: str) -> None:
        for instance in self.gpus[gpu]:
            self.foreign -= {c.uuid for c in instance.compute}
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
    """The driver interface of the simulated hardware."""

    def __init__(self, hardware: Hardware, steps: Steps) -> None:
        self.hardware = hardware
        self.steps = steps
        self.xids: list[tuple[str, int]] = []
        self.readings = GpuUsage(40, 0, 0)
        self.running: list[int] = []
        self.mig_status = 0
        self.pending: dict[str, bool] = {}
        self.names: dict[str, str] = {}

    def version(self) -> str:
        return "580.1"

    def gpus(self) -> list[str | DriverError]:
        self.steps.before("gpus")
        return [gpu for gpu in self.hardware.gpus if gpu not in self.hardware.missing]

    def read(self, gpu: str) -> GpuReading:
        self.steps.before("read")
        if gpu in self.hardware.missing or gpu not in self.hardware.gpus:
            raise DriverError(NOT_FOUND, "read")
        mig = self.hardware.mig.get(gpu, True)
        return GpuReading(
            uuid=gpu, index=list(self.hardware.gpus).index(gpu), name=self.names.get(gpu, "A30"),
            memory_mib=24 * 1024, minor=0, mig=mig, pending=self.pending.get(gpu, mig),
            profiles=() if mig is None else self.hardware.profiles(),
            instances=tuple(sorted(self.hardware.gpus[gpu], key=lambda i: i.start)) if mig else (),
        )  # fmt: skip

    def usage(self, gpu: str) -> GpuUsage:
        return self.readings

    def events(self) -> list[tuple[str, int]]:
        events, self.xids = self.xids, []
        return events

    def processes(self, gpu: str) -> list[int]:
        return self.running

    def create_gpu_instance(self, gpu: str, profile_id: int, start: int, size: int) -> None:
        self.steps.before("create_gpu_instance")
        self.hardware.add(gpu, profile_id, start, False)
        self.steps.after("create_gpu_instance")

    def create_compute_instance(self, target: InstanceRef) -> None:
        self.steps.before("create_compute_instance")
        found = self._find(target)
        if found.compute:
            raise DriverError(INSUFFICIENT, "create_compute_instance")
        self._replace(target.gpu, found, (ComputeReading(0, self.hardware.uuid()),))
        self.steps.after("create_compute_instance")

    def destroy_compute_instance(self, target: InstanceRef, compute: ComputeReading) -> None:
        self.steps.before("destroy_compute_instance")
        found = self._find(target)
        if compute not in found.compute:
            raise DriverError(INVALID_STATE, "destroy_compute_instance")
        if (target.gpu, target.start) in self.hardware.busy:
            raise DriverError(IN_USE, "destroy_compute_instance")
        self.hardware.foreign -= {compute.uuid}
        self._replace(target.gpu, found, tuple(c for c in found.compute if c != compute))
        self.steps.after("destroy_compute_instance")

    def destroy_gpu_instance(self, target: InstanceRef) -> None:
        self.steps.before("destroy_gpu_instance")
        found = self._find(target)
        if found.compute:
            raise DriverError(IN_USE, "destroy_gpu_instance")
        self.hardware.gpus[target.gpu].remove(found)
        self.steps.after("destroy_gpu_instance")

    def enable_mig(self, gpu: str) -> None:
        if self.mig_status:
            self.pending[gpu] = True
            raise DriverError(self.mig_status, "enable_mig")
        self.hardware.mig[gpu] = True

    def reopen(self) -> None: ...

    def close(self) -> None: ...

    def _find(self, target: InstanceRef) -> InstanceReading:
        for found in self.hardware.gpus[target.gpu]:
            if InstanceRef(target.gpu, found.id, found.profile_id, found.start) == target:
                return found
        raise DriverError(INVALID_STATE, "find")

    def _replace(
        self, gpu: str, old: InstanceReading, compute: tuple[ComputeReading, ...]
    ) -> None:  # fmt: skip
        here = self.hardware.gpus[gpu]
        here[here.index(old)] = replace(old, compute=compute)


@dataclass
class ServiceState:
    """The service's side of the protocol: the desired state and what agents reported."""

    instances: dict[tuple[str, int], DesiredInstance] = field(default_factory=dict)
    evict: list[Eviction] = field(default_factory=list)
    last_report: dict[str, object] = field(default_factory=dict)
    phases: dict[tuple[str, int], dict[str, object]] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)
    released: set[tuple[str, int]] = field(default_factory=set)

    def desired(self) -> Desired:
        return Desired(1, tuple(self.instances.values()), tuple(self.evict))

    def place(self, allocation: str, gpu: str, profile: str, start: int, size: int) -> None:
        item = DesiredInstance(allocation, 0, gpu, profile, start, size, True)
        self.instances[item.part] = item

    def release(self, allocation: str) -> None:
        self.instances[allocation, 0] = replace(self.instances[allocation, 0], present=False)

    def receive_report(self, reported: dict[str, object]) -> bool:
        """Process a report; return whether the desired state changed."""
        before = self.desired()
        self.last_report = reported
        instances = reported["instances"]
        assert isinstance(instances, list)
        for one in instances:
            part = (one["allocation"], one["index"])
            item = self.instances.get(part)
            if item is None:
                continue
            self.phases[part] = one
            if one["phase"] == "active":
                self.instances[part] = replace(item, uuid=one["uuid"])
            elif one["phase"] == "failed":
                self.failures[part] = one["detail"]
                self.instances[part] = replace(item, present=False)
            elif one["phase"] == "gone" and not item.present:
                del self.instances[part]
                self.released.add(part)
        foreign = reported["foreign"]
        assert isinstance(foreign, list)
        existing = {(f["gpu"], f["profile"], f["start"], f["uuid"]) for f in foreign}
        self.evict = [e for e in self.evict if (e.gpu, e.profile, e.start, e.uuid) in existing]
        return self.desired() != before

    def forget_uuids(self) -> None:
        """Forget all UUIDs, as the service does after a reboot; instances stay desired."""
        self.instances = {part: replace(item, uuid="") for part, item in self.instances.items()}

    def blocked(self, gpu: str, start: int, size: int) -> bool:
        """Whether known instances occupy any of these slices."""
        foreign = self.last_report.get("foreign", [])
        assert isinstance(foreign, list)
        taken = [(f["gpu"], f["start"], f["size"]) for f in foreign]
        taken += [(w.gpu, w.start, w.size) for w in self.instances.values()]
        return any(g == gpu and s < start + size and start < s + n for g, s, n in taken)


class World:
    """A node, its service and its agent, which can be killed."""

    def __init__(self, folder: Path, gpus: int = 1, cdi: bool = True) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.hardware = Hardware.of(gpus)
        self.service = ServiceState()
        self.steps = Steps()
        self.driver = SimulatedDriver(self.hardware, self.steps)
        self.now = 0.0
        self.kills = 0
        self.failed_refresh = False
        self.cdi = Cdi(folder / "cdi", "580.1", folder) if cdi else None
        self.reboots = self.hardware.boot
        self.start()

    def start(self) -> None:
        """Start a new agent, which has only the files of the previous one."""
        boot = str(self.hardware.boot)
        if self.reboots != self.hardware.boot:
            self.reboots = self.hardware.boot
            self.service.forget_uuids()
        node = NodeState(self.driver, GpuIndex(self.folder), Health(self.folder, boot))
        record = Record(self.folder, boot)
        self.reconciler = Reconciler(node, record, self.cdi, lambda: self.now, random.Random(1))

    def step(self) -> None:
        """Refresh, reconcile and report once, and restart the agent if it is killed."""
        try:
            self.reconciler.set_desired(self.service.desired())
            self.reconciler.node.refresh()
            self.reconciler.reconcile(True)
            self.service.receive_report(report(self.reconciler.node, self.reconciler))
        except Killed:
            self.kills += 1
            self.start()
        except DriverError:
            self.failed_refresh = True  # The next step refreshes again.
        due = self.reconciler.next_due()
        self.now = max(self.now + 10.0, min(due, self.now + 400.0))

    def settle(self, most: int = 60) -> None:
        """Step until nothing changes."""
        for _ in range(most):
            before = (self.kills, self.state())
            self.failed_refresh = False
            self.step()
            if self.kills != before[0] or self.failed_refresh:
                continue
            calm = all(
                self.reconciler.progress(item).phase in (Phase.ACTIVE, Phase.GONE, None)
                for item in self.reconciler.desired.instances
            )
            if calm and before[1] == self.state() and not self.service.evict:
                return

    def state(self) -> object:
        return (repr(self.hardware.everything), repr(self.service.desired()))

    def check(self) -> None:
        """Check that hardware, record and CDI files match the desired state."""
        left = dict(self.service.instances)
        for gpu, instance in self.hardware.everything:
            if instance.uuid in self.hardware.foreign:
                continue
            items = [w for w in left.values() if w.key == (gpu, instance.profile, instance.start)]
            assert len(items) == 1, f"{instance} on {gpu} is not desired"
            assert items[0].present
            assert items[0].uuid == instance.uuid != ""
            del left[items[0].part]
        assert not left, f"desired, but missing: {left}"
        stages = {own.stage for own in self.reconciler.record}
        assert stages <= {Stage.COMPLETE}
        if self.cdi is not None:
            files = {p.name for p in self.cdi.folder.glob("*.json")}
            assert files == {
                f"slicewise.dev-mig-{w.uuid}.json" for w in self.service.instances.values()
            }
