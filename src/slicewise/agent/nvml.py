"""The driver interface on NVML.

A reading is complete or an error. If two answers of the driver contradict each other, such as a MIG
device without its GPU instance, the reading is rejected: a missing instance could otherwise be
taken for destroyed.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any

from slicewise.agent.driver import (
    FUNCTION_NOT_FOUND,
    INVALID_STATE,
    NOT_SUPPORTED,
    TIMEOUT,
    UNKNOWN,
    ComputeReading,
    DriverError,
    GpuReading,
    GpuUsage,
    InstanceReading,
    InstanceRef,
    ProfileReading,
)
from slicewise.agent.nvml_binding import Binding, handle_address

_XID_EVENT = 0x8
_MAX_EVENTS = 1000
_UNCORRECTED, _SINCE_DRIVER_LOAD = 1, 0

_NAME_SUFFIXES = {7: "+me", 8: "+me", 10: "+gfx", 11: "+gfx", 12: "+gfx", 17: "+gfx",
                  13: "-me", 14: "-me", 15: "+me.all", 16: "+me.all"}  # fmt: skip
"""Suffix of a profile's name by NVML's number, for drivers that do not report names."""


class Nvml:
    """Implements `driver.Driver` with NVML."""

    def __init__(self) -> None:
        """Load and initialize NVML; raise SlicewiseError without a driver."""
        self._nvml = Binding()
        self._profile_cache: dict[str, tuple[ProfileReading, ...]] = {}
        self._compute_profile_cache: dict[tuple[str, int], list[Any]] = {}
        self._event_set: Any = None
        self._registered: dict[int, str] = {}
        """UUIDs of the GPUs registered for XID events, by handle address."""
        self._initialized = False
        self.reopen()

    def reopen(self) -> None:
        """Shut down and initialize NVML again."""
        self.close()
        self._nvml.call("nvmlInit")
        self._initialized = True

    def close(self) -> None:
        """Shut down NVML; instances stay."""
        self._profile_cache.clear()
        self._compute_profile_cache.clear()
        if self._event_set is not None:
            with contextlib.suppress(DriverError):
                self._nvml.call("nvmlEventSetFree", self._event_set)
        self._event_set = None
        self._registered.clear()
        if self._initialized:
            self._initialized = False
            with contextlib.suppress(DriverError):
                self._nvml.call("nvmlShutdown")

    def version(self) -> str:
        """Return the driver version."""
        return str(self._nvml.call("nvmlSystemGetDriverVersion"))

    def gpus(self) -> list[str | DriverError]:
        """Return the GPU UUIDs by index, with an error in place of a GPU that does not answer."""
        found: list[str | DriverError] = []
        for index in range(int(self._nvml.call("nvmlDeviceGetCount"))):
            try:
                found.append(self._uuid(self._nvml.call("nvmlDeviceGetHandleByIndex", index)))
            except DriverError as error:
                found.append(error)
        return found

    def read(self, gpu: str) -> GpuReading:
        """Read a GPU with its profiles and instances."""
        handle = self._handle(gpu)
        mig, pending = self._mig_mode(gpu, handle)
        memory = self._nvml.call("nvmlDeviceGetMemoryInfo", handle).total >> 20
        profiles: tuple[ProfileReading, ...] = ()
        instances: tuple[InstanceReading, ...] = ()
        if mig is not None:
            profiles = self._profiles(gpu, handle, memory)
        if mig:
            instances = self._instances(gpu, handle, profiles)
            profiles = tuple(self._with_free(handle, profile) for profile in profiles)
        pci = self._nvml.call_optional("nvmlDeviceGetPciInfo", handle)
        return GpuReading(
            uuid=gpu,
            index=int(self._nvml.call("nvmlDeviceGetIndex", handle)),
            name=str(self._nvml.call("nvmlDeviceGetName", handle)),
            memory_mib=memory,
            minor=self._nvml.call_optional("nvmlDeviceGetMinorNumber", handle),
            pci_device="" if pci is None else f"0x{pci.pciDeviceId >> 16:04X}",
            mig=mig,
            pending=pending,
            profiles=profiles,
            instances=instances,
        )

    def usage(self, gpu: str) -> GpuUsage:
        """Read temperature, errors and memory use; values that the GPU lacks are None."""
        handle = self._handle(gpu)
        temperature = self._nvml.temperature(handle)
        memory = self._nvml.memory_used(handle)
        instances = []
        for device in self._nvml.mig_devices(handle):
            used = self._nvml.memory_used(device)
            if used is not None:
                instances.append((self._uuid(device), used))
        uncorrected = self._nvml.call_optional(
            "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_DRIVER_LOAD
        )
        return GpuUsage(temperature, uncorrected, memory or 0, tuple(instances))

    def events(self) -> list[tuple[str, int]]:
        """Return the XID errors since the last call; none if the driver has no events."""
        try:
            self._register_gpus()
        except DriverError:
            return []
        found: list[tuple[str, int]] = []
        for _ in range(_MAX_EVENTS):
            try:
                event = self._nvml.call("nvmlEventSetWait", self._event_set, 0)
            except DriverError as error:
                if error.code != TIMEOUT:
                    self._registered.clear()  # A GPU may have left the set: register all again.
                break
            if event.eventType & _XID_EVENT:
                found.append((self._event_gpu(event.device), int(event.eventData)))
        return found

    def processes(self, gpu: str) -> list[int]:
        """Return the ids of the processes that use the GPU."""
        return sorted(self._nvml.processes(self._handle(gpu)))

    # Changes

    def create_gpu_instance(self, gpu: str, profile_id: int, start: int, size: int) -> None:
        """Create a GPU instance at exactly this placement."""
        self._nvml.create_gpu_instance(self._handle(gpu), profile_id, start, size)

    def create_compute_instance(self, target: InstanceRef) -> None:
        """Create a compute instance that spans the whole GPU instance."""
        instance = self._checked_instance(target)
        offered = self._compute_profiles(target.gpu, instance, target.profile_id)
        if not offered:
            raise DriverError(
                NOT_SUPPORTED, "nvmlGpuInstanceGetComputeInstanceProfileInfo",
                f"GPU instance {target.id} of {target.gpu} offers no compute instance",
            )  # fmt: skip
        whole = max(offered, key=lambda info: (info.sliceCount, info.multiprocessorCount))
        self._nvml.call("nvmlGpuInstanceCreateComputeInstance", instance, whole.id)

    def destroy_compute_instance(self, target: InstanceRef, compute: ComputeReading) -> None:
        """Destroy a compute instance, after a check that both ids still mean the same instances."""
        instance = self._checked_instance(target)
        handle = self._nvml.call("nvmlGpuInstanceGetComputeInstanceById", instance, compute.id)
        # Another program may have created an instance with the same ids; its UUID differs.
        uuid = self._mig_uuids(self._handle(target.gpu)).get((target.id, compute.id), "")
        if uuid != compute.uuid:
            raise DriverError(
                INVALID_STATE, "nvmlDeviceGetUUID",
                f"compute instance {compute.id} of GPU instance {target.id} of {target.gpu} is not "
                f"the expected one: it is {uuid or 'gone'}, not {compute.uuid}",
            )  # fmt: skip
        self._nvml.call("nvmlComputeInstanceDestroy", handle)

    def destroy_gpu_instance(self, target: InstanceRef) -> None:
        """Destroy a GPU instance, after a check that the id still means the same instance.

        The driver refuses to destroy an instance that has compute instances.
        """
        self._nvml.call("nvmlGpuInstanceDestroy", self._checked_instance(target))

    def enable_mig(self, gpu: str) -> None:
        """Enable MIG mode; raise if it does not take effect at once."""
        status = int(self._nvml.call("nvmlDeviceSetMigMode", self._handle(gpu), 1))
        self._profile_cache.pop(gpu, None)
        if status:
            raise DriverError(status, "nvmlDeviceSetMigMode")

    def _checked_instance(self, target: InstanceRef) -> Any:
        """The handle of a GPU instance; raise if the id now means another instance."""
        gpu = self._handle(target.gpu)
        handle = self._nvml.call("nvmlDeviceGetGpuInstanceById", gpu, target.id)
        info = self._nvml.call("nvmlGpuInstanceGetInfo", handle)
        found = InstanceRef(target.gpu, info.id, info.profileId, info.placement.start)
        if found != target:
            raise DriverError(
                INVALID_STATE, "nvmlGpuInstanceGetInfo",
                f"GPU instance {target.id} of {target.gpu} is not the expected one: it has profile "
                f"id {found.profile_id} at slice {found.start}, not {target.profile_id} at "
                f"{target.start}",
            )  # fmt: skip
        return handle

    # Reading

    def _handle(self, gpu: str) -> Any:
        return self._nvml.call("nvmlDeviceGetHandleByUUID", gpu)

    def _uuid(self, device: Any) -> str:
        return str(self._nvml.call("nvmlDeviceGetUUID", device))

    def _mig_mode(self, gpu: str, handle: Any) -> tuple[bool | None, bool | None]:
        """The current and the pending MIG mode; None if the GPU does not support MIG."""
        try:
            current, pending = self._nvml.call("nvmlDeviceGetMigMode", handle)
        except DriverError as error:
            # For a GPU that supported MIG before, the answer is an error of the driver.
            unsupported = error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND)
            if unsupported and gpu not in self._profile_cache:
                return None, None
            raise
        return bool(current), bool(pending)

    def _profiles(self, gpu: str, handle: Any, memory: int) -> tuple[ProfileReading, ...]:
        """The profiles of a GPU. They never change, and are cached once two readings agree."""
        if gpu not in self._profile_cache:
            first, second = (self._read_profiles(handle, memory) for _ in range(2))
            if first != second:
                raise DriverError(
                    UNKNOWN, "nvmlDeviceGetGpuInstanceProfileInfo",
                    f"the driver reported two different lists of profiles for {gpu}",
                )  # fmt: skip
            self._profile_cache[gpu] = first
        return self._profile_cache[gpu]

    def _read_profiles(self, handle: Any, memory: int) -> tuple[ProfileReading, ...]:
        found: dict[int, ProfileReading] = {}
        for number, info in self._nvml.gpu_instance_profiles(handle):
            placements = self._nvml.placements(handle, info.id)
            if not placements or info.id in found:
                continue
            found[info.id] = ProfileReading(
                id=int(info.id),
                name=profile_name(info, number, memory),
                size=placements[0][1],
                compute=int(info.sliceCount),
                memory_mib=int(info.memorySizeMB),
                maximum=int(info.instanceCount),
                starts=tuple(sorted(start for start, _ in placements)),
            )
        return tuple(found.values())

    def _with_free(self, handle: Any, profile: ProfileReading) -> ProfileReading:
        function = "nvmlDeviceGetGpuInstanceRemainingCapacity"
        return replace(profile, free=self._nvml.call_optional(function, handle, profile.id))

    def _instances(
        self, gpu: str, handle: Any, profiles: tuple[ProfileReading, ...]
    ) -> tuple[InstanceReading, ...]:
        """All GPU instances with their compute instances; raise if the lists contradict."""
        names = {profile.id: profile.name for profile in profiles}
        uuids = self._mig_uuids(handle)
        found: list[InstanceReading] = []
        for profile in profiles:
            for instance in self._nvml.gpu_instances(handle, profile.id):
                info = self._nvml.call("nvmlGpuInstanceGetInfo", instance)
                compute = sorted(self._compute_ids(gpu, instance, int(info.profileId)))
                for number in compute:
                    if (info.id, number) not in uuids:
                        raise _inconsistent(
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
        listed = {(instance.id, c.id) for instance in found for c in instance.compute}
        for pair in uuids:
            if pair not in listed:
                raise _inconsistent(gpu, f"the MIG device of GPU instance {pair[0]}")
        return tuple(sorted(found, key=lambda instance: (instance.start, instance.id)))

    def _mig_uuids(self, handle: Any) -> dict[tuple[int, int], str]:
        """The UUIDs of the MIG devices by (GPU instance id, compute instance id)."""
        uuids: dict[tuple[int, int], str] = {}
        for device in self._nvml.mig_devices(handle):
            gpu_instance = int(self._nvml.call("nvmlDeviceGetGpuInstanceId", device))
            compute_instance = int(self._nvml.call("nvmlDeviceGetComputeInstanceId", device))
            uuids[gpu_instance, compute_instance] = self._uuid(device)
        return uuids

    def _compute_ids(self, gpu: str, instance: Any, profile_id: int) -> list[int]:
        return [
            int(self._nvml.call("nvmlComputeInstanceGetInfo", compute).id)
            for offered in self._compute_profiles(gpu, instance, profile_id)
            for compute in self._nvml.compute_instances(instance, offered.id)
        ]

    def _compute_profiles(self, gpu: str, instance: Any, profile_id: int) -> list[Any]:
        """The compute instance profiles of a GPU instance profile, which never change."""
        key = (gpu, profile_id)
        if key not in self._compute_profile_cache:
            by_id: dict[int, Any] = {}
            for info in self._nvml.compute_instance_profiles(instance):
                by_id.setdefault(int(info.id), info)
            if not by_id:
                return []
            self._compute_profile_cache[key] = list(by_id.values())
        return self._compute_profile_cache[key]

    # Events

    def _register_gpus(self) -> None:
        """Register all GPUs for XID events that are not registered yet."""
        if self._event_set is None:
            self._event_set = self._nvml.call("nvmlEventSetCreate")
        for gpu in self.gpus():
            if isinstance(gpu, str) and gpu not in self._registered.values():
                with contextlib.suppress(DriverError):  # The next call tries again.
                    self._register(gpu)

    def _register(self, gpu: str) -> None:
        handle = self._handle(gpu)
        try:
            self._nvml.call("nvmlDeviceRegisterEvents", handle, _XID_EVENT, self._event_set)
        except DriverError as error:
            if error.code != NOT_SUPPORTED:
                raise
        self._registered[handle_address(handle)] = gpu

    def _event_gpu(self, device: Any) -> str:
        """The UUID of the GPU of an event; a lost GPU no longer reports it."""
        try:
            return self._uuid(device)
        except DriverError:
            return self._registered.get(handle_address(device), "")


def _inconsistent(gpu: str, what: str) -> DriverError:
    return DriverError(
        UNKNOWN, "nvmlDeviceGetGpuInstances",
        f"the driver's lists of instances of {gpu} contradict each other: {what} is missing in one",
    )  # fmt: skip


def profile_name(info: Any, number: int, memory: int) -> str:
    """The name of a profile; derived as the driver does if the driver does not report it."""
    reported = getattr(info, "name", b"")
    text = reported.decode("ascii", "replace") if isinstance(reported, bytes) else str(reported)
    name = text.strip()
    if name:
        return name.removeprefix("MIG ")
    eighths = math.ceil(info.memorySizeMB / memory * 8) if memory else 0
    gigabytes = math.floor(eighths / 8 * math.ceil(memory / 1024) + 0.5)
    return f"{info.sliceCount}g.{gigabytes}gb{_NAME_SUFFIXES.get(number, '')}"
