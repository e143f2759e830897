"""The driver through NVML; beside `binding`, no other module knows of it.

A reading is whole or an error. Wherever two of the driver's answers do not fit together (an
instance by its device but not by its profile, say) the reading is refused, since somebody might
take what is missing from it for gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from typing import Any

from slicewise.agent.binding import ABSENT, INVALID_ARGUMENT, MOST_LISTED, Binding
from slicewise.agent.driver import (
    FUNCTION_NOT_FOUND,
    INVALID_STATE,
    NOT_FOUND,
    NOT_SUPPORTED,
    TIMEOUT,
    UNKNOWN,
    At,
    ComputeReading,
    DriverError,
    GpuReading,
    InstanceReading,
    ProfileReading,
    Usage,
)

_NOT_OFFERED = {INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND}
"""How drivers say that a kind of instance does not exist on a GPU."""
_XID = 0x8
_EVENTS_AT_ONCE = 1000

_SUFFIX = {7: "+me", 8: "+me", 10: "+gfx", 11: "+gfx", 12: "+gfx", 17: "+gfx",
           13: "-me", 14: "-me", 15: "+me.all", 16: "+me.all"}  # fmt: skip
"""What a profile's name ends in, by its number; for drivers that do not tell names."""


class Nvml:
    """NVML, initialised; ``close`` lets it go."""

    def __init__(self) -> None:
        """Load the library; without one, one sentence says so."""
        self._nvml = Binding()
        self._offers: dict[str, tuple[ProfileReading, ...]] = {}
        self._compute_profiles: dict[tuple[str, int], tuple[Any, ...]] = {}
        self._events: Any = None
        self._registered: dict[int, str] = {}
        """By handle: the UUIDs of the GPUs whose errors are kept for us."""
        self._open = False
        self.reopen()

    def reopen(self) -> None:
        """Begin anew with the driver."""
        self.close()
        self._nvml.call("nvmlInit")
        self._open = True

    def close(self) -> None:
        """Let go of the driver."""
        self._offers.clear()
        self._compute_profiles.clear()
        if self._events is not None:
            with contextlib.suppress(DriverError):
                self._nvml.call("nvmlEventSetFree", self._events)
        self._events = None
        self._registered.clear()
        if self._open:
            self._open = False
            with contextlib.suppress(DriverError):
                self._nvml.call("nvmlShutdown")

    def version(self) -> str:
        """The driver's version."""
        return str(self._nvml.call("nvmlSystemGetDriverVersion"))

    def gpus(self) -> list[str | DriverError]:
        """The UUIDs by index; an error for one that does not answer."""
        found: list[str | DriverError] = []
        for index in range(int(self._nvml.call("nvmlDeviceGetCount"))):
            try:
                handle = self._nvml.call("nvmlDeviceGetHandleByIndex", index)
                found.append(str(self._nvml.call("nvmlDeviceGetUUID", handle)))
            except DriverError as error:
                found.append(error)
        return found

    def read(self, gpu: str) -> GpuReading:
        """One GPU with its profiles and instances."""
        handle = self._handle(gpu)
        mig, pending = self._mig(gpu, handle)
        memory = self._nvml.call("nvmlDeviceGetMemoryInfo", handle).total >> 20
        profiles: tuple[ProfileReading, ...] = ()
        instances: tuple[InstanceReading, ...] = ()
        if mig is not None:
            profiles = self._profiles(gpu, handle, memory)
        if mig:
            instances = self._instances(gpu, handle, profiles)
            profiles = tuple(self._with_room(handle, profile) for profile in profiles)
        return GpuReading(
            uuid=gpu,
            index=int(self._nvml.call("nvmlDeviceGetIndex", handle)),
            name=str(self._nvml.call("nvmlDeviceGetName", handle)),
            memory_mib=memory,
            minor=self._nvml.perhaps("nvmlDeviceGetMinorNumber", handle),
            pci_device=self._pci_device(handle),
            mig=mig,
            pending=pending,
            profiles=profiles,
            instances=instances,
        )

    def usage(self, gpu: str) -> Usage:
        """Temperature, errors and memory in use; what a GPU does not tell is left out."""
        handle = self._handle(gpu)
        temperature = self._nvml.perhaps("nvmlDeviceGetTemperature", handle, 0)
        if temperature is None:
            temperature = self._nvml.perhaps("nvmlDeviceGetTemperatureV", handle, 0)
        memory = self._memory(handle)
        used = []
        for device in self._devices(handle):
            info = self._memory(device)
            if info is not None:
                used.append((str(self._nvml.call("nvmlDeviceGetUUID", device)), info))
        return Usage(
            temperature=temperature,
            uncorrected=self._nvml.perhaps("nvmlDeviceGetTotalEccErrors", handle, 1, 0),
            memory_used=memory or 0,
            instances=tuple(used),
        )

    def events(self) -> list[tuple[str, int]]:
        """The XID errors since last asked; a driver without events has none."""
        try:
            self._listen()
        except DriverError:
            return []
        found: list[tuple[str, int]] = []
        for _ in range(_EVENTS_AT_ONCE):
            try:
                event = self._nvml.call("nvmlEventSetWait", self._events, 0)
            except DriverError as error:
                if error.code != TIMEOUT:
                    self._registered.clear()  # Listen anew: a GPU may have left the set.
                break
            if event.eventType & _XID:
                found.append((self._told_of(event.device), int(event.eventData)))
        return found

    def processes(self, gpu: str) -> list[int]:
        """The processes that use the GPU, computing or drawing."""
        handle = self._handle(gpu)
        found: set[int] = set()
        for kind in ("Compute", "Graphics"):
            for form in ("_v3", "_v2"):
                try:
                    call = f"nvmlDeviceGet{kind}RunningProcesses{form}"
                    found |= {int(process.pid) for process in self._nvml.call(call, handle)}
                    break
                except DriverError as error:
                    # What draws need not be known: the driver itself refuses to switch under it.
                    if kind == "Compute" and (error.code not in ABSENT or form == "_v2"):
                        raise
        return sorted(found)

    def create_gpu_instance(self, gpu: str, profile_id: int, start: int, size: int) -> None:
        """A GPU instance at exactly that place."""
        place = self._nvml.lib.c_nvmlGpuInstancePlacement_t(start, size)
        handle = self._handle(gpu)
        # The binding hands the placement on as it gets it; C wants its address.
        self._nvml.call(
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            handle,
            profile_id,
            ctypes.byref(place),
        )

    def create_compute_instance(self, at: At) -> None:
        """A compute instance over all of that GPU instance."""
        instance = self._instance(at)
        offered = self._compute_offers(at.gpu, instance, at.profile_id)
        if not offered:
            raise DriverError(
                NOT_SUPPORTED, "nvmlGpuInstanceGetComputeInstanceProfileInfo",
                f"GPU instance {at.id} of {at.gpu} offers no compute instance",
            )  # fmt: skip
        whole = max(offered, key=lambda info: (info.sliceCount, info.multiprocessorCount))
        self._nvml.call("nvmlGpuInstanceCreateComputeInstance", instance, whole.id)

    def destroy_compute_instance(self, at: At, compute: ComputeReading) -> None:
        """Destroy exactly that compute instance of exactly that GPU instance."""
        instance = self._instance(at)
        handle = self._nvml.call("nvmlGpuInstanceGetComputeInstanceById", instance, compute.id)
        # Somebody may have made another at the same place, which then has the same ids.
        uuid = self._uuids(self._handle(at.gpu)).get((at.id, compute.id), "")
        if uuid != compute.uuid:
            raise DriverError(
                INVALID_STATE, "nvmlDeviceGetUUID",
                f"compute instance {compute.id} of GPU instance {at.id} of {at.gpu} is not the one "
                f"that was meant: it is {uuid or 'gone'}, not {compute.uuid}",
            )  # fmt: skip
        self._nvml.call("nvmlComputeInstanceDestroy", handle)

    def destroy_gpu_instance(self, at: At) -> None:
        """Destroy exactly that GPU instance; the driver refuses one with compute instances."""
        self._nvml.call("nvmlGpuInstanceDestroy", self._instance(at))

    def enable_mig(self, gpu: str) -> None:
        """Switch MIG mode on; an error where it does not take effect at once."""
        status = int(self._nvml.call("nvmlDeviceSetMigMode", self._handle(gpu), 1))
        self._offers.pop(gpu, None)
        if status:
            raise DriverError(status, "nvmlDeviceSetMigMode")

    # Reading

    def _handle(self, gpu: str) -> Any:
        return self._nvml.call("nvmlDeviceGetHandleByUUID", gpu)

    def _instance(self, at: At) -> Any:
        """The handle of a GPU instance, after a look whether it is still the one that is meant."""
        handle = self._nvml.call("nvmlDeviceGetGpuInstanceById", self._handle(at.gpu), at.id)
        info = self._nvml.call("nvmlGpuInstanceGetInfo", handle)
        if (info.id, info.profileId, info.placement.start) != (at.id, at.profile_id, at.start):
            raise DriverError(
                INVALID_STATE, "nvmlGpuInstanceGetInfo",
                f"GPU instance {at.id} of {at.gpu} is not the one that was meant: it has profile "
                f"id {info.profileId} at slice {info.placement.start}, not {at.profile_id} at "
                f"{at.start}",
            )  # fmt: skip
        return handle

    def _mig(self, gpu: str, handle: Any) -> tuple[bool | None, bool | None]:
        try:
            current, pending = self._nvml.call("nvmlDeviceGetMigMode", handle)
        except DriverError as error:
            # A GPU that had MIG has not lost it: then the answer is a fault, not a fact.
            if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND) and gpu not in self._offers:
                return None, None
            raise
        return bool(current), bool(pending)

    def _profiles(self, gpu: str, handle: Any, memory: int) -> tuple[ProfileReading, ...]:
        """What a GPU offers, which does not change; kept once two readings agree."""
        if gpu not in self._offers:
            first, second = (self._read_profiles(handle, memory) for _ in range(2))
            if first != second:
                raise DriverError(
                    UNKNOWN, "nvmlDeviceGetGpuInstanceProfileInfo",
                    f"the driver gave two lists of profiles for {gpu}",
                )  # fmt: skip
            self._offers[gpu] = first
        return self._offers[gpu]

    def _read_profiles(self, handle: Any, memory: int) -> tuple[ProfileReading, ...]:
        found: dict[int, ProfileReading] = {}
        for number in range(getattr(self._nvml.lib, "NVML_GPU_INSTANCE_PROFILE_COUNT", 10)):
            try:
                info = self._nvml.either("nvmlDeviceGetGpuInstanceProfileInfo", handle, number)
            except DriverError as error:
                if error.code in _NOT_OFFERED:
                    continue
                raise
            places = self._places(handle, info.id)
            if not places or info.id in found:
                continue
            found[info.id] = ProfileReading(
                id=int(info.id),
                name=_name(info, number, memory),
                size=places[0][1],
                compute=int(info.sliceCount),
                memory_mib=int(info.memorySizeMB),
                maximum=int(info.instanceCount),
                starts=tuple(sorted(start for start, _ in places)),
            )
        return tuple(found.values())

    def _places(self, handle: Any, profile_id: int) -> list[tuple[int, int]]:
        """Where a profile may be placed. Older drivers have a form without the ability to ask how
        many there are; an array that is large enough suits both."""
        array = (self._nvml.lib.c_nvmlGpuInstancePlacement_t * MOST_LISTED)()
        count = ctypes.c_uint(MOST_LISTED)
        name = "nvmlDeviceGetGpuInstancePossiblePlacements"
        try:
            self._nvml.call(name, handle, profile_id, array, ctypes.byref(count))
        except DriverError as error:
            if error.code not in ABSENT:
                raise
            self._nvml.raw(name, handle, profile_id, array, ctypes.byref(count))
        return [(int(array[i].start), int(array[i].size)) for i in range(count.value)]

    def _with_room(self, handle: Any, profile: ProfileReading) -> ProfileReading:
        free = self._nvml.perhaps("nvmlDeviceGetGpuInstanceRemainingCapacity", handle, profile.id)
        return ProfileReading(**{**vars(profile), "free": free})

    def _instances(
        self, gpu: str, handle: Any, profiles: tuple[ProfileReading, ...]
    ) -> tuple[InstanceReading, ...]:
        """Every GPU instance with its compute instances and their UUIDs."""
        names = {profile.id: profile.name for profile in profiles}
        uuids = self._uuids(handle)
        found: list[InstanceReading] = []
        for profile in profiles:
            for instance in self._nvml.listed(
                "nvmlDeviceGetGpuInstances", "c_nvmlGpuInstance_t", handle, profile.id
            ):
                info = self._nvml.call("nvmlGpuInstanceGetInfo", instance)
                compute = sorted(self._compute_ids(gpu, instance, int(info.profileId)))
                for number in compute:
                    if (info.id, number) not in uuids:
                        raise self._torn(
                            gpu, f"compute instance {number} of GPU instance {info.id}"
                        )
                found.append(
                    InstanceReading(
                        id=int(info.id),
                        profile_id=int(info.profileId),
                        profile=names.get(int(info.profileId), ""),
                        start=int(info.placement.start),
                        size=int(info.placement.size),
                        compute=tuple(ComputeReading(n, uuids[info.id, n]) for n in compute),
                    )
                )
        seen = {(instance.id, c.id) for instance in found for c in instance.compute}
        for pair in uuids:
            if pair not in seen:
                raise self._torn(gpu, f"the device of instance {pair[0]}")
        return tuple(sorted(found, key=lambda instance: (instance.start, instance.id)))

    def _uuids(self, handle: Any) -> dict[tuple[int, int], str]:
        """The UUIDs of the MIG devices of a GPU, by GPU instance and compute instance."""
        return {
            (self._id("nvmlDeviceGetGpuInstanceId", device),
             self._id("nvmlDeviceGetComputeInstanceId", device)):
            str(self._nvml.call("nvmlDeviceGetUUID", device))
            for device in self._devices(handle)
        }  # fmt: skip

    @staticmethod
    def _torn(gpu: str, what: str) -> DriverError:
        return DriverError(
            UNKNOWN, "nvmlDeviceGetGpuInstances",
            f"the driver's lists of instances of {gpu} do not fit together: {what} is in one only",
        )  # fmt: skip

    def _devices(self, handle: Any) -> list[Any]:
        """The MIG devices of a GPU."""
        found: list[Any] = []
        try:
            most = int(self._nvml.call("nvmlDeviceGetMaxMigDeviceCount", handle))
        except DriverError as error:
            if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                return []
            raise
        for index in range(most):
            try:
                found.append(self._nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index))
            except DriverError as error:
                if error.code not in _NOT_OFFERED:
                    raise
        return found

    def _compute_ids(self, gpu: str, instance: Any, profile_id: int) -> list[int]:
        found: list[int] = []
        for offered in self._compute_offers(gpu, instance, profile_id):
            for compute in self._nvml.listed(
                "nvmlGpuInstanceGetComputeInstances", "c_nvmlComputeInstance_t", instance,
                offered.id,
            ):  # fmt: skip
                found.append(int(self._nvml.call("nvmlComputeInstanceGetInfo", compute).id))
        return found

    def _compute_offers(self, gpu: str, instance: Any, profile_id: int) -> tuple[Any, ...]:
        """The kinds of compute instances a kind of GPU instance offers, which do not change."""
        key = (gpu, profile_id)
        if key not in self._compute_profiles:
            found: dict[int, Any] = {}
            for number in range(getattr(self._nvml.lib, "NVML_COMPUTE_INSTANCE_PROFILE_COUNT", 8)):
                name = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
                try:
                    info = self._nvml.either(name, instance, number, 0)
                except DriverError as error:
                    if error.code in _NOT_OFFERED:
                        continue
                    raise
                found.setdefault(int(info.id), info)
            if not found:
                return ()
            self._compute_profiles[key] = tuple(found.values())
        return self._compute_profiles[key]

    def _memory(self, device: Any) -> int | None:
        """Bytes in use: without what the driver keeps for itself, where it tells them apart."""
        form = getattr(self._nvml.lib, "nvmlMemory_v2", None)
        info = self._nvml.perhaps("nvmlDeviceGetMemoryInfo", device, form)
        if info is None:
            info = self._nvml.perhaps("nvmlDeviceGetMemoryInfo", device)
        return None if info is None else int(info.used)

    def _pci_device(self, handle: Any) -> str:
        info = self._nvml.perhaps("nvmlDeviceGetPciInfo", handle)
        return "" if info is None else f"0x{info.pciDeviceId >> 16:04X}"

    def _listen(self) -> None:
        """Have XID errors of every GPU kept for us, also of those that came later."""
        if self._events is None:
            self._events = self._nvml.call("nvmlEventSetCreate")
        for gpu in self.gpus():
            if isinstance(gpu, str) and gpu not in self._registered.values():
                with contextlib.suppress(DriverError):  # Next time, perhaps.
                    self._register(gpu)

    def _register(self, gpu: str) -> None:
        handle = self._handle(gpu)
        try:
            self._nvml.call("nvmlDeviceRegisterEvents", handle, _XID, self._events)
        except DriverError as error:
            if error.code != NOT_SUPPORTED:
                raise
        self._registered[_number(handle)] = gpu

    def _told_of(self, device: Any) -> str:
        """Of which GPU an error is told; one that is lost no longer says who it is."""
        try:
            return str(self._nvml.call("nvmlDeviceGetUUID", device))
        except DriverError:
            return self._registered.get(_number(device), "")

    def _id(self, call: str, device: Any) -> int:
        return int(self._nvml.call(call, device))


def _number(handle: Any) -> int:
    """A handle, to compare it by."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _name(info: Any, number: int, memory: int) -> str:
    """A profile's name as the driver gives it, or as the driver would make it."""
    told = getattr(info, "name", b"")
    name = (told.decode("ascii", "replace") if isinstance(told, bytes) else str(told)).strip()
    if name:
        return name.removeprefix("MIG ")
    eighths = math.ceil(info.memorySizeMB / memory * 8) if memory else 0
    gigabytes = math.floor(eighths / 8 * math.ceil(memory / 1024) + 0.5)
    return f"{info.sliceCount}g.{gigabytes}gb{_SUFFIX.get(number, '')}"
