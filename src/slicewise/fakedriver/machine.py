"""A simulated machine: its GPUs and instances in a state file, and the events that change them."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, memmove, sizeof
from dataclasses import dataclass
from pathlib import Path

from slicewise.catalog import CatalogEntry, load_entry
from slicewise.core.errors import PlacementError, SlicewiseError, UnknownNameError
from slicewise.fakedriver import faults, layout, library, model_data

STATE_VARIABLE = "SLICEWISE_FAKE_NVML"
ROOT_VARIABLE = "SLICEWISE_HOST_ROOT"

DRIVER = "580.65.06"
_NVML_MAJOR = "13"
_CUDA_VERSION = 13000
_NVIDIA_VENDOR_ID = 0x10DE
_NAMESPACE = uuid.UUID("6f1d3c52-6c57-5c0b-9d0f-3f8c1c7f5a10")
"""The namespace of all generated UUIDs."""

_BOOT_ID = "proc/sys/kernel/random/boot_id"
_XID = 0x8
_DOUBLE_BIT_ECC = 0x2
_XID_OFF_THE_BUS = 79


@dataclass(frozen=True)
class SimulatedGpu:
    """The current state of a GPU."""

    index: int
    """Index in the machine. NVML's index is the same unless GPUs were removed."""
    uuid: str
    mig: bool
    mig_pending: bool
    lost: bool
    removed: bool
    temperature: int


@dataclass(frozen=True)
class ComputeView:
    """A compute instance, which is a MIG device."""

    id: int
    uuid: str
    profile: str
    start: int
    slices: int
    memory_used: int


@dataclass(frozen=True)
class SimulatedInstance:
    """A GPU instance and its compute instances."""

    gpu: int
    gpu_uuid: str
    profile: str
    profile_id: int
    start: int
    size: int
    id: int
    busy: int
    """The process that uses it, or 0."""
    computes: tuple[ComputeView, ...]


class Machine(faults.FaultInjection):
    """Controls a simulated machine; several objects and processes may share one state file."""

    def __init__(self, path: str | Path) -> None:
        """Open the state file of an existing machine."""
        self.path = Path(path).absolute()
        try:
            with self.path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size != sizeof(layout.File):
                    raise SlicewiseError(f"{path}: not a state file of the fake driver")
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise SlicewiseError(f"{path}: cannot be opened: {error.strerror}") from None
        super().__init__(layout.File.from_buffer(self._map))
        if self._file.magic != layout.MAGIC or self._file.digest != library.digest():
            raise SlicewiseError(
                f"{path}: not a state file of this version of the fake driver; create it again"
            )

    @classmethod
    def create(
        cls,
        path: str | Path,
        model: str | Path | CatalogEntry,
        gpus: int,
        mig: bool = True,
        seed: int = 0,
        driver: str = DRIVER,
    ) -> Machine:
        """Create a machine with GPUs of one model and without instances.

        All UUIDs derive from the seed: machines with different seeds share no UUID.
        """
        if not 1 <= gpus <= layout.MAX_GPUS:
            raise SlicewiseError(f"a fake machine has 1 to {layout.MAX_GPUS} GPUs, not {gpus}")
        if not 0 <= seed < 1 << 64:
            raise SlicewiseError(f"the seed {seed} is not in 0..2^64-1")
        entry = model if isinstance(model, CatalogEntry) else load_entry(model)
        file = layout.File(magic=layout.MAGIC, digest=library.digest(), size=sizeof(layout.File))
        model_data.fill(file, entry)
        file.driver_version, file.nvml_version = driver.encode(), f"{_NVML_MAJOR}.{driver}".encode()
        file.cuda_version, file.seed, file.gpu_count = _CUDA_VERSION, seed, gpus
        image = file.images[0]
        image.next_serial = 1
        image.boot_id = str(uuid.uuid5(_NAMESPACE, f"boot {seed}")).encode()
        device_id = int(next(iter(entry.pci_device_ids), "0x2335"), 16)
        for index in range(gpus):
            facts, gpu = file.facts[index], image.gpus[index]
            facts.uuid = f"GPU-{uuid.uuid5(_NAMESPACE, f'{seed} {index}')}".encode()
            facts.serial = f"{1650000000000 + seed % 10**9 * 16 + index}".encode()
            facts.minor, facts.bus = index, 0x10 + 8 * index
            facts.pci_device_id = device_id << 16 | _NVIDIA_VENDOR_ID
            facts.pci_subsystem_id = 0x18BF << 16 | _NVIDIA_VENDOR_ID
            # Some real dies are mirrored; here, every other one is.
            facts.mirrored = (index + seed) % 2
            gpu.mig = gpu.mig_pending = mig
            gpu.temperature = 34 + index
        _write(Path(path), bytes(file))
        _write(_root(Path(path)) / _BOOT_ID, image.boot_id + b"\n")
        return cls(path)

    # State

    @property
    def boot_id(self) -> str:
        """The content of /proc/sys/kernel/random/boot_id on this machine."""
        return str(self._snapshot().boot_id, "ascii")

    @property
    def root(self) -> Path:
        """The folder that agents use as the root of the machine's file system.

        It contains a boot id and no processes, so agents do not see those of the real host.
        """
        return _root(self.path)

    @property
    def boot_id_file(self) -> Path:
        """The boot id file that agents read instead of the kernel's."""
        return self.root / _BOOT_ID

    @property
    def gpus(self) -> tuple[SimulatedGpu, ...]:
        """The GPUs by index."""
        image = self._snapshot()
        return tuple(
            SimulatedGpu(
                index,
                self._file.facts[index].uuid.decode(),
                bool(gpu.mig),
                bool(gpu.mig_pending),
                bool(gpu.lost),
                bool(gpu.removed),
                gpu.temperature,
            )
            for index, gpu in enumerate(image.gpus[: self._file.gpu_count])
        )

    def instances(self, gpu: int | str | None = None) -> tuple[SimulatedInstance, ...]:
        """The instances of one GPU or of all, ordered by GPU and start."""
        image = self._snapshot()
        indexes = range(self._file.gpu_count) if gpu is None else (self.index(gpu),)
        found = [
            self._view(image.gpus[index], index, instance)
            for index in indexes
            for instance in image.gpus[index].instances
            if instance.serial
        ]
        return tuple(sorted(found, key=lambda view: (view.gpu, view.start)))

    def index(self, gpu: int | str) -> int:
        """Return the index of a GPU, given its index or UUID."""
        uuids = [self._file.facts[i].uuid.decode() for i in range(self._file.gpu_count)]
        if isinstance(gpu, str):
            if gpu not in uuids:
                raise UnknownNameError("GPU", gpu, uuids)
            return uuids.index(gpu)
        if not 0 <= gpu < len(uuids):
            raise SlicewiseError(f"no GPU {gpu} in this machine ({len(uuids)} GPUs)")
        return gpu

    def environment(self, library: Path) -> dict[str, str]:
        """The environment variables with which a program finds the library and the machine."""
        before = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "LD_LIBRARY_PATH": f"{library.parent}:{before}" if before else str(library.parent),
            STATE_VARIABLE: str(self.path),
            ROOT_VARIABLE: str(self.root),
        }

    # Other programs

    def create_instance(
        self, gpu: int | str, profile: str, start: int, compute: bool = True
    ) -> SimulatedInstance:
        """Create an instance as another program would; raise PlacementError if it does not fit."""
        index = self.index(gpu)
        number, data = self._profile(profile)
        with self._changing() as image:
            state = image.gpus[index]
            if not state.mig:
                raise PlacementError(f"GPU {index}: MIG mode is off")
            if start not in data.starts[: data.start_count]:
                raise PlacementError(f"{profile} cannot start at slice {start}")
            if not self._fits(state, data, start):
                raise PlacementError(f"{profile} does not fit at slice {start} of GPU {index}")
            row = data.instance_ids[self._file.facts[index].mirrored]
            created = next(slot for slot in state.instances if not slot.serial)
            created.serial, created.profile, created.start = image.next_serial, number, start
            created.id, created.busy = row[list(data.starts).index(start)], 0
            image.next_serial += 1
            if compute:
                slot = next(slot for slot in state.computes if not slot.serial)
                slot.serial, slot.parent = image.next_serial, created.serial
                slot.profile = data.compute_profile_count - 1
                slot.start = slot.id = slot.memory_used = 0
                name = f"{self._file.seed} {index} instance {slot.serial}"
                slot.uuid = f"MIG-{uuid.uuid5(_NAMESPACE, name)}".encode()
                image.next_serial += 1
            view = self._view(state, index, created)
        return view

    def destroy_instance(self, gpu: int | str, start: int) -> None:
        """Destroy an instance and its compute instances as another program would."""
        with self._changing() as image:
            state, instance = self._at(image, gpu, start)
            _clear(state, instance.serial)

    def set_busy(self, gpu: int | str, start: int, process: int = 1) -> None:
        """Mark an instance as used by a process; destroying it then fails with "in use"."""
        with self._changing() as image:
            self._at(image, gpu, start)[1].busy = process

    def set_idle(self, gpu: int | str, start: int) -> None:
        """Mark an instance as unused."""
        self.set_busy(gpu, start, 0)

    def set_memory_used(self, gpu: int | str, start: int, amount: int) -> None:
        """Set the bytes in use in each compute instance of an instance."""
        with self._changing() as image:
            state, instance = self._at(image, gpu, start)
            for compute in state.computes:
                if compute.serial and compute.parent == instance.serial:
                    compute.memory_used = amount

    # Hardware

    def set_mig(self, gpu: int | str, on: bool) -> None:
        """Set MIG mode at once, as with a reset; instances are destroyed."""
        with self._changing() as image:
            state = image.gpus[self.index(gpu)]
            state.mig = state.mig_pending = on
            _clear(state)

    def set_temperature(self, gpu: int | str, degrees: int) -> None:
        """Set the temperature of a GPU."""
        with self._changing() as image:
            image.gpus[self.index(gpu)].temperature = degrees

    def add_ecc(self, gpu: int | str, uncorrected: int = 0, corrected: int = 0) -> None:
        """Add memory errors; uncorrected ones also cause an event."""
        index = self.index(gpu)
        with self._changing() as image:
            for kind, number in enumerate((corrected, uncorrected)):
                for counter in range(2):
                    image.gpus[index].ecc[kind][counter] += number
            if uncorrected:
                _add_event(image, _DOUBLE_BIT_ECC, 0, index)

    def xid(self, gpu: int | str, number: int, start: int | None = None) -> None:
        """Report an XID error of one instance or of the whole GPU."""
        index = self.index(gpu)
        with self._changing() as image:
            instance = layout.ANY if start is None else self._at(image, gpu, start)[1].id
            compute = layout.ANY if start is None else 0
            _add_event(image, _XID, number, index, instance, compute)

    def lose(self, gpu: int | str) -> None:
        """Let a GPU fall off the bus: XID 79, and every call for it fails with "GPU is lost"."""
        index = self.index(gpu)
        with self._changing() as image:
            image.gpus[index].lost = True
            _add_event(image, _XID, _XID_OFF_THE_BUS, index)

    def remove(self, gpu: int | str) -> None:
        """Remove a GPU: lost for running processes, missing for processes that start later."""
        with self._changing() as image:
            image.gpus[self.index(gpu)].removed = True

    def restore(self, gpu: int | str) -> None:
        """Bring a lost or removed GPU back, without instances."""
        with self._changing() as image:
            state = image.gpus[self.index(gpu)]
            state.lost = state.removed = False
            self._power_cycle(state)

    def reset(self, gpu: int | str) -> None:
        """Reset a GPU: instances are destroyed, and a pending MIG mode takes effect."""
        with self._changing() as image:
            state = image.gpus[self.index(gpu)]
            state.mig = state.mig_pending
            _clear(state)

    def reboot(self) -> None:
        """Restart the machine: instances are destroyed, and the boot id changes.

        MIG mode is kept on Ampere, and is off on later architectures.
        """
        with self._changing() as image:
            for gpu in image.gpus[: self._file.gpu_count]:
                self._power_cycle(gpu)
            boot = uuid.uuid5(_NAMESPACE, image.boot_id.decode())
            image.boot_id = str(boot).encode()
            _write(self.boot_id_file, image.boot_id + b"\n")

    def _power_cycle(self, gpu: layout.Gpu) -> None:
        """Set a GPU to its state after a power cycle."""
        _clear(gpu)
        gpu.mig_pending = gpu.mig_pending if self._file.mode_needs_reset else 0
        gpu.mig = gpu.mig_pending
        for kind in range(2):
            gpu.ecc[kind][0] = 0

    # The state file

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Open the file each time: a kept descriptor would share its lock with forked processes.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _changing(self) -> Iterator[layout.Image]:
        """A copy of the state; it becomes active when the block ends without an error."""
        with self._locked():
            images = self._file.images
            active = self._file.active
            memmove(addressof(images[1 - active]), addressof(images[active]), sizeof(layout.Image))
            yield images[1 - active]
            self._file.active = 1 - active

    def _snapshot(self) -> layout.Image:
        """A copy of the active state."""
        with self._locked():
            return layout.Image.from_buffer_copy(self._file.images[self._file.active])

    def _profile(self, name: str) -> tuple[int, layout.GpuProfile]:
        names = [_profile_name(p.name) for p in self._file.profiles[: self._file.profile_count]]
        if name not in names:
            raise UnknownNameError("profile of this machine", name, names)
        return names.index(name), self._file.profiles[names.index(name)]

    def _fits(self, gpu: layout.Gpu, profile: layout.GpuProfile, start: int) -> bool:
        """Whether free slices and budgets suffice."""
        used = [(i.start, self._file.profiles[i.profile]) for i in gpu.instances if i.serial]
        disjoint = all(
            start + profile.size <= other or other + neighbour.size <= start
            for other, neighbour in used
        )
        return disjoint and all(
            profile.uses[number] + sum(other.uses[number] for _, other in used)
            <= self._file.budgets[number]
            for number in range(self._file.budget_count)
        )

    def _at(
        self, image: layout.Image, gpu: int | str, start: int
    ) -> tuple[layout.Gpu, layout.GpuInstance]:
        state = image.gpus[self.index(gpu)]
        for instance in state.instances:
            if instance.serial and instance.start == start:
                return state, instance
        raise PlacementError(f"no instance starts at slice {start} of GPU {gpu}")

    def _view(self, gpu: layout.Gpu, index: int, instance: layout.GpuInstance) -> SimulatedInstance:
        profile = self._file.profiles[instance.profile]
        computes = (c for c in gpu.computes if c.serial and c.parent == instance.serial)
        return SimulatedInstance(
            index,
            self._file.facts[index].uuid.decode(),
            _profile_name(profile.name),
            profile.id,
            instance.start,
            profile.size,
            instance.id,
            instance.busy,
            tuple(
                ComputeView(
                    compute.id,
                    compute.uuid.decode(),
                    _profile_name(profile.compute_profiles[compute.profile].name),
                    compute.start,
                    profile.compute_profiles[compute.profile].slices,
                    compute.memory_used,
                )
                for compute in sorted(computes, key=lambda c: c.id)
            ),
        )

    def __repr__(self) -> str:
        return f"Machine({self.path})"


def _profile_name(name: bytes) -> str:
    """A profile's name without NVIDIA's prefix."""
    return name.decode().removeprefix("MIG ")


def _clear(gpu: layout.Gpu, serial: int | None = None) -> None:
    """Clear one instance of a GPU or all, with their compute instances."""
    for instance in gpu.instances:
        if serial in (None, instance.serial):
            memmove(addressof(instance), bytes(sizeof(instance)), sizeof(instance))
    for compute in gpu.computes:
        if serial in (None, compute.parent):
            memmove(addressof(compute), bytes(sizeof(compute)), sizeof(compute))


def _add_event(
    image: layout.Image,
    kind: int,
    data: int,
    gpu: int,
    instance: int = layout.ANY,
    compute: int = layout.ANY,
) -> None:
    """Add an event."""
    image.events[image.event_count % layout.MAX_EVENTS] = layout.Event(
        kind, data, gpu, instance, compute
    )
    image.event_count += 1


def _root(path: Path) -> Path:
    return path.absolute().with_name(path.name + ".root")


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be written: {error.strerror}") from None
