"""A machine with GPUs that do not exist: its state in a file, and everything that can go wrong."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import addressof, memmove, sizeof
from pathlib import Path

from slicewise.catalog import Entry, load_entry
from slicewise.core.errors import PlacementError, SlicewiseError, UnknownNameError
from slicewise.fakedriver import building, faults, layout, modelling
from slicewise.fakedriver.views import ComputeView, GpuView, InstanceView

STATE_VARIABLE = "SLICEWISE_FAKE_NVML"
ROOT_VARIABLE = "SLICEWISE_HOST_ROOT"

DRIVER = "580.65.06"
_NVML = "13"
_CUDA = 13000
_NVIDIA = 0x10DE
_NAMES = uuid.UUID("6f1d3c52-6c57-5c0b-9d0f-3f8c1c7f5a10")
"""What all made-up UUIDs derive from."""

_BOOT_ID = "proc/sys/kernel/random/boot_id"
_XID = 0x8
_DOUBLE_BIT_ECC = 0x2
_OFF_THE_BUS = 79


class Machine(faults.Faulty):
    """A hold on a machine's state; any number of them may exist, in any number of processes."""

    def __init__(self, path: str | Path) -> None:
        """Take hold of a machine that was created."""
        self.path = Path(path).absolute()
        try:
            with self.path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size != sizeof(layout.File):
                    raise SlicewiseError(f"{path}: not a state of the fake driver")
                self._map = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise SlicewiseError(f"{path}: cannot be opened: {error.strerror}") from None
        super().__init__(layout.File.from_buffer(self._map))
        if self._file.magic != layout.MAGIC or self._file.digest != building.digest():
            raise SlicewiseError(
                f"{path}: not a state of this version of the fake driver; create it again"
            )

    @classmethod
    def create(
        cls,
        path: str | Path,
        model: str | Path | Entry,
        gpus: int,
        mig: bool = True,
        seed: int = 0,
        driver: str = DRIVER,
    ) -> Machine:
        """Make a machine with this many GPUs of a model, with no instances on them.

        The seed makes its UUIDs: machines of different seeds have no GPU or instance in common.
        """
        if not 1 <= gpus <= layout.MAX_GPUS:
            raise SlicewiseError(f"a fake machine has 1 to {layout.MAX_GPUS} GPUs, not {gpus}")
        if not 0 <= seed < 1 << 64:
            raise SlicewiseError(f"the seed {seed} is not in 0..2^64-1")
        entry = model if isinstance(model, Entry) else load_entry(model)
        file = layout.File(magic=layout.MAGIC, digest=building.digest(), size=sizeof(layout.File))
        modelling.fill(file, entry)
        file.driver_version, file.nvml_version = driver.encode(), f"{_NVML}.{driver}".encode()
        file.cuda_version, file.seed, file.gpu_count = _CUDA, seed, gpus
        image = file.images[0]
        image.next_serial = 1
        image.boot_id = str(uuid.uuid5(_NAMES, f"boot {seed}")).encode()
        device_id = int(next(iter(entry.pci_device_ids), "0x2335"), 16)
        for index in range(gpus):
            facts, gpu = file.facts[index], image.gpus[index]
            facts.uuid = f"GPU-{uuid.uuid5(_NAMES, f'{seed} {index}')}".encode()
            facts.serial = f"{1650000000000 + seed % 10**9 * 16 + index}".encode()
            facts.minor, facts.bus = index, 0x10 + 8 * index
            facts.pci_device_id = device_id << 16 | _NVIDIA
            facts.pci_subsystem_id = 0x18BF << 16 | _NVIDIA
            # On some dies the halves are swapped; here on every other, so that both occur.
            facts.mirrored = (index + seed) % 2
            gpu.mig = gpu.mig_pending = mig
            gpu.temperature = 34 + index
        _write(Path(path), bytes(file))
        _write(_root(Path(path)) / _BOOT_ID, image.boot_id + b"\n")
        return cls(path)

    # What there is

    @property
    def boot_id(self) -> str:
        """What /proc/sys/kernel/random/boot_id would say."""
        return str(self._now().boot_id, "ascii")

    @property
    def root(self) -> Path:
        """The folder that agents take for the root of the machine's file system.

        It holds a boot id and no process, so agents do not see what runs on the real host.
        """
        return _root(self.path)

    @property
    def boot_id_file(self) -> Path:
        """The file agents read instead of the kernel's."""
        return self.root / _BOOT_ID

    @property
    def gpus(self) -> tuple[GpuView, ...]:
        """The GPUs, by their place in the machine."""
        image = self._now()
        return tuple(
            GpuView(
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

    def instances(self, gpu: int | str | None = None) -> tuple[InstanceView, ...]:
        """The instances of one GPU or of all, by GPU and start."""
        image = self._now()
        chosen = range(self._file.gpu_count) if gpu is None else (self.index(gpu),)
        found = [
            self._view(image.gpus[index], index, instance)
            for index in chosen
            for instance in image.gpus[index].instances
            if instance.serial
        ]
        return tuple(sorted(found, key=lambda view: (view.gpu, view.start)))

    def index(self, gpu: int | str) -> int:
        """The place of a GPU, given its place or its UUID."""
        uuids = [self._file.facts[i].uuid.decode() for i in range(self._file.gpu_count)]
        if isinstance(gpu, str):
            if gpu not in uuids:
                raise UnknownNameError("GPU", gpu, uuids)
            return uuids.index(gpu)
        if not 0 <= gpu < len(uuids):
            raise SlicewiseError(f"no GPU {gpu} in this machine ({len(uuids)} GPUs)")
        return gpu

    def environment(self, library: Path) -> dict[str, str]:
        """The variables with which a program finds the driver (LD_LIBRARY_PATH) and machine."""
        before = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "LD_LIBRARY_PATH": f"{library.parent}:{before}" if before else str(library.parent),
            STATE_VARIABLE: str(self.path),
            ROOT_VARIABLE: str(self.root),
        }

    # What others do

    def create_instance(
        self, gpu: int | str, profile: str, start: int, compute: bool = True
    ) -> InstanceView:
        """Make an instance as somebody else would, by hand, say; refused where it does not fit."""
        index = self.index(gpu)
        number, told = self._profile(profile)
        with self._changing() as image:
            there = image.gpus[index]
            if not there.mig:
                raise PlacementError(f"GPU {index}: MIG mode is off")
            if start not in told.starts[: told.start_count]:
                raise PlacementError(f"{profile} cannot start at slice {start}")
            if not self._fits(there, told, start):
                raise PlacementError(f"{profile} does not fit at slice {start} of GPU {index}")
            row = told.instance_ids[self._file.facts[index].mirrored]
            made = next(slot for slot in there.instances if not slot.serial)
            made.serial, made.profile, made.start = image.next_serial, number, start
            made.id, made.busy = row[list(told.starts).index(start)], 0
            image.next_serial += 1
            if compute:
                slot = next(slot for slot in there.computes if not slot.serial)
                slot.serial, slot.parent = image.next_serial, made.serial
                slot.profile = told.compute_profile_count - 1
                slot.start = slot.id = slot.memory_used = 0
                name = f"{self._file.seed} {index} instance {slot.serial}"
                slot.uuid = f"MIG-{uuid.uuid5(_NAMES, name)}".encode()
                image.next_serial += 1
            view = self._view(there, index, made)
        return view

    def destroy_instance(self, gpu: int | str, start: int) -> None:
        """Take an instance away as somebody else would, with its compute instances."""
        with self._changing() as image:
            there, instance = self._at(image, gpu, start)
            _wipe(there, instance.serial)

    def busy(self, gpu: int | str, start: int, process: int = 1) -> None:
        """Let a process use an instance, so that destroying it answers "in use"."""
        with self._changing() as image:
            self._at(image, gpu, start)[1].busy = process

    def idle(self, gpu: int | str, start: int) -> None:
        """Nobody uses the instance any more."""
        self.busy(gpu, start, 0)

    def use_memory(self, gpu: int | str, start: int, amount: int) -> None:
        """So many bytes are in use in the compute instances of an instance, in each."""
        with self._changing() as image:
            there, instance = self._at(image, gpu, start)
            for compute in there.computes:
                if compute.serial and compute.parent == instance.serial:
                    compute.memory_used = amount

    # What happens to hardware

    def set_mig(self, gpu: int | str, on: bool) -> None:
        """Switch MIG mode at once, as an operator with a reset would; instances go."""
        with self._changing() as image:
            there = image.gpus[self.index(gpu)]
            there.mig = there.mig_pending = on
            _wipe(there)

    def set_temperature(self, gpu: int | str, degrees: int) -> None:
        """Let a GPU be this hot."""
        with self._changing() as image:
            image.gpus[self.index(gpu)].temperature = degrees

    def add_ecc(self, gpu: int | str, uncorrected: int = 0, corrected: int = 0) -> None:
        """More memory errors; uncorrected ones are told as an event, too."""
        index = self.index(gpu)
        with self._changing() as image:
            for kind, number in enumerate((corrected, uncorrected)):
                for counter in range(2):
                    image.gpus[index].ecc[kind][counter] += number
            if uncorrected:
                _tell(image, _DOUBLE_BIT_ECC, 0, index)

    def xid(self, gpu: int | str, number: int, start: int | None = None) -> None:
        """The driver logs an XID error, of one instance or of the whole GPU."""
        index = self.index(gpu)
        with self._changing() as image:
            instance = layout.ANY if start is None else self._at(image, gpu, start)[1].id
            compute = layout.ANY if start is None else 0
            _tell(image, _XID, number, index, instance, compute)

    def lose(self, gpu: int | str) -> None:
        """A GPU falls off the bus: XID 79, and every call about it answers "GPU is lost"."""
        index = self.index(gpu)
        with self._changing() as image:
            image.gpus[index].lost = True
            _tell(image, _XID, _OFF_THE_BUS, index)

    def remove(self, gpu: int | str) -> None:
        """A GPU is taken out: lost to those who run, not there for those who start."""
        with self._changing() as image:
            image.gpus[self.index(gpu)].removed = True

    def restore(self, gpu: int | str) -> None:
        """A lost or removed GPU is back, with nothing on it."""
        with self._changing() as image:
            there = image.gpus[self.index(gpu)]
            there.lost = there.removed = False
            self._restart(there)

    def reset(self, gpu: int | str) -> None:
        """Reset a GPU: instances go, and a pending MIG mode takes effect."""
        with self._changing() as image:
            there = image.gpus[self.index(gpu)]
            there.mig = there.mig_pending
            _wipe(there)

    def reboot(self) -> None:
        """Restart the machine: instances go, the boot id changes.

        MIG mode stays on Ampere; on everything later it is off.
        """
        with self._changing() as image:
            for gpu in image.gpus[: self._file.gpu_count]:
                self._restart(gpu)
            boot = uuid.uuid5(_NAMES, image.boot_id.decode())
            image.boot_id = str(boot).encode()
            _write(self.boot_id_file, image.boot_id + b"\n")

    def _restart(self, gpu: layout.Gpu) -> None:
        """A GPU as it comes up after power was off."""
        _wipe(gpu)
        gpu.mig_pending = gpu.mig_pending if self._file.mode_needs_reset else 0
        gpu.mig = gpu.mig_pending
        for kind in range(2):
            gpu.ecc[kind][0] = 0

    # The state

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Opened anew each time: a descriptor kept would share its lock with forked processes.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _changing(self) -> Iterator[layout.Image]:
        """A copy of the state to change; it counts when the block ends without an error."""
        with self._locked():
            images = self._file.images
            active = self._file.active
            memmove(addressof(images[1 - active]), addressof(images[active]), sizeof(layout.Image))
            yield images[1 - active]
            self._file.active = 1 - active

    def _now(self) -> layout.Image:
        """A copy of the state."""
        with self._locked():
            return layout.Image.from_buffer_copy(self._file.images[self._file.active])

    def _profile(self, name: str) -> tuple[int, layout.GpuProfile]:
        names = [_plain(p.name) for p in self._file.profiles[: self._file.profile_count]]
        if name not in names:
            raise UnknownNameError("profile of this machine", name, names)
        return names.index(name), self._file.profiles[names.index(name)]

    def _fits(self, gpu: layout.Gpu, profile: layout.GpuProfile, start: int) -> bool:
        """Whether slices and budgets allow it."""
        here = [(i.start, self._file.profiles[i.profile]) for i in gpu.instances if i.serial]
        apart = all(
            start + profile.size <= other or other + their.size <= start for other, their in here
        )
        return apart and all(
            profile.uses[number] + sum(their.uses[number] for _, their in here)
            <= self._file.budgets[number]
            for number in range(self._file.budget_count)
        )

    def _at(
        self, image: layout.Image, gpu: int | str, start: int
    ) -> tuple[layout.Gpu, layout.GpuInstance]:
        there = image.gpus[self.index(gpu)]
        for instance in there.instances:
            if instance.serial and instance.start == start:
                return there, instance
        raise PlacementError(f"no instance starts at slice {start} of GPU {gpu}")

    def _view(self, gpu: layout.Gpu, index: int, instance: layout.GpuInstance) -> InstanceView:
        profile = self._file.profiles[instance.profile]
        computes = (c for c in gpu.computes if c.serial and c.parent == instance.serial)
        return InstanceView(
            index,
            self._file.facts[index].uuid.decode(),
            _plain(profile.name),
            profile.id,
            instance.start,
            profile.size,
            instance.id,
            instance.busy,
            tuple(
                ComputeView(
                    compute.id,
                    compute.uuid.decode(),
                    _plain(profile.compute_profiles[compute.profile].name),
                    compute.start,
                    profile.compute_profiles[compute.profile].slices,
                    compute.memory_used,
                )
                for compute in sorted(computes, key=lambda c: c.id)
            ),
        )

    def __repr__(self) -> str:
        return f"Machine({self.path})"


def _plain(name: bytes) -> str:
    """A profile's name without the word NVIDIA puts in front."""
    return name.decode().removeprefix("MIG ")


def _wipe(gpu: layout.Gpu, serial: int | None = None) -> None:
    """Clear one instance of a GPU, or all, with what is in them."""
    for instance in gpu.instances:
        if serial in (None, instance.serial):
            memmove(addressof(instance), bytes(sizeof(instance)), sizeof(instance))
    for compute in gpu.computes:
        if serial in (None, compute.parent):
            memmove(addressof(compute), bytes(sizeof(compute)), sizeof(compute))


def _tell(
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
    """Write a file so that it appears whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).replace(path)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be written: {error.strerror}") from None
