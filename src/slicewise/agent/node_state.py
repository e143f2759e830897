"""The GPUs of this node: their indexes, last readings, usage and problems."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from slicewise.agent.discovery import GpuModel, identify, unusable_reason
from slicewise.agent.driver import (
    LIBRARY_MISMATCH,
    UNKNOWN,
    Driver,
    DriverError,
    GpuReading,
    GpuUsage,
)
from slicewise.agent.health import Health
from slicewise.agent.record import RecordError, write_file
from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")
MAX_MESSAGE = 1000
"""The service accepts messages up to about this length."""


class DriverChangedError(SlicewiseError):
    """Raised when the driver was replaced; the agent must be restarted to use the new one."""


class NodeState:
    """The GPUs of this node as the driver reports them."""

    def __init__(self, driver: Driver, index: GpuIndex, health: Health) -> None:
        self.driver = driver
        self._index = index
        self._health = health
        self.gpus: list[str] = []
        """UUIDs by index."""
        self.readings: dict[str, GpuReading] = {}
        """The last complete reading of each GPU."""
        self.usage: dict[str, GpuUsage] = {}
        self._read_errors: dict[str, str] = {}
        """Why the last reading of a GPU failed."""
        self._absent: set[str] = set()
        """GPUs that the driver no longer lists."""
        self.list_error = ""
        """Why a listed GPU does not report its UUID."""
        self.conflict = ""
        """Why no GPU of the node may be changed: another MIG manager is running."""
        self.mig_problems: dict[str, str] = {}
        """Why MIG mode of a GPU could not be enabled yet."""
        self.version = ""
        self._model: GpuModel | None = None

    def refresh(self) -> None:
        """Read the driver version, all GPUs and their XID errors."""
        try:
            self.version = self.driver.version()
            listed = self.driver.gpus()
        except DriverError as error:
            _raise_if_driver_changed(error)
            for gpu in self.gpus:
                self._read_errors[gpu] = str(error)
            self._reopen_driver()
            if not self.gpus:
                raise
            return
        found = [gpu for gpu in listed if isinstance(gpu, str)]
        errors = [gpu for gpu in listed if isinstance(gpu, DriverError)]
        self.gpus = self._index.update(found)
        # A GPU that does not report its UUID is probably one of the missing ones.
        self.list_error = str(errors[0]) if errors else ""
        self._absent = set() if errors else {gpu for gpu in self.gpus if gpu not in found}
        for gpu in self.gpus:
            if gpu in found:
                self._read_and_log(gpu)
            else:
                self._read_errors[gpu] = self.list_error or "the driver no longer lists it"
        self._read_events()

    def read(self, gpu: str) -> GpuReading:
        """Read one GPU."""
        try:
            reading = self.driver.read(gpu)
        except DriverError as error:
            self._read_errors[gpu] = str(error)
            raise
        if reading.uuid != gpu:
            raise DriverError(
                UNKNOWN, "nvmlDeviceGetHandleByUUID", f"{gpu} is now {reading.uuid or 'unknown'}"
            )
        self._read_errors.pop(gpu, None)
        self.readings[gpu] = reading
        return reading

    def read_usage(self) -> None:
        """Read temperature and memory use of all GPUs, and check for new memory errors."""
        for gpu in self.gpus:
            if gpu in self._read_errors:
                continue
            try:
                usage = self.driver.usage(gpu)
            except DriverError:
                continue  # The next refresh reports the cause.
            self.usage[gpu] = usage
            if usage.uncorrected is not None and self._health.uncorrected(gpu, usage.uncorrected):
                _log.error("%s is unhealthy: %s", gpu, self._health.problem(gpu))

    def is_read(self, gpu: str) -> bool:
        """Whether the last attempt to read a GPU succeeded."""
        return gpu in self.readings and gpu not in self._read_errors

    def is_absent(self, gpu: str) -> bool:
        """Whether the driver lists its GPUs and this one is not among them."""
        return gpu in self._absent or (gpu not in self.gpus and bool(self.gpus))

    def model(self) -> GpuModel | None:
        """The model of this node's GPUs: that of the first usable one."""
        if self._model is None:
            for gpu in self.gpus:
                reading = self.readings.get(gpu)
                if reading is not None and not unusable_reason(reading):
                    self._model = identify(reading)
                    break
        return self._model

    def problem(self, gpu: str) -> str:
        """Why a GPU must not get new instances; empty if it may."""
        reasons = [
            self._health.problem(gpu),
            self._read_errors.get(gpu, ""),
            self.mig_problems.get(gpu, ""),
        ]
        reading = self.readings.get(gpu)
        if reading is not None:
            reasons.append(unusable_reason(reading) or self._model_mismatch(reading))
            if reading.pending is not None and reading.pending != reading.mig:
                mode = "on" if reading.pending else "off"
                reasons.append(f"the GPU needs a reset: MIG mode will be {mode} after a reset")
        reasons.append(self.conflict)
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason))[:MAX_MESSAGE]

    def mig(self, gpu: str) -> bool:
        """Whether MIG mode was on at the last reading."""
        reading = self.readings.get(gpu)
        return reading is not None and reading.mig is True

    def _read_and_log(self, gpu: str) -> None:
        """Read a GPU; log when the error changes or ends."""
        before = self._read_errors.get(gpu)
        try:
            self.read(gpu)
        except DriverError as error:
            if str(error) != before:
                _log.error("%s cannot be read: %s", gpu, error)
        else:
            if before is not None:
                _log.info("%s can be read again", gpu)

    def _model_mismatch(self, reading: GpuReading) -> str:
        """Why a GPU does not fit the node: all GPUs of a node must have the same model."""
        first = reading
        for gpu in self.gpus:
            if gpu in self.readings and self.readings[gpu].profiles:
                first = self.readings[gpu]
                break
        if _profile_shapes(first) == _profile_shapes(reading):
            return ""
        return f"it is a {reading.name} and offers other profiles than {first.uuid}, a {first.name}"

    def _read_events(self) -> None:
        try:
            events = self.driver.events()
        except DriverError:
            return
        for gpu, number in events:
            if gpu and self._health.xid(gpu, number):
                _log.error("%s is unhealthy: %s", gpu, self._health.problem(gpu))
            else:
                _log.warning("%s reported XID %d", gpu or "an unknown GPU", number)

    def _reopen_driver(self) -> None:
        try:
            self.driver.reopen()
        except DriverError as error:
            _raise_if_driver_changed(error)
            _log.error("the driver does not answer: %s", error)


class GpuIndex:
    """The index of each GPU of this node, kept on disk: a missing GPU does not move others."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gpus.json"
        self._gpus: list[str] = []
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if isinstance(data, list) and all(isinstance(gpu, str) for gpu in data):
                self._gpus = data

    def update(self, found: Sequence[str]) -> list[str]:
        """Assign indexes to the GPUs that were found; missing ones keep theirs."""
        gpus = assign_indexes(self._gpus, found)
        if gpus != self._gpus:
            self._gpus = gpus
            with contextlib.suppress(RecordError):
                write_file(self._path, json.dumps(gpus) + "\n")
        return list(gpus)


def assign_indexes(known: Sequence[str], found: Sequence[str]) -> list[str]:
    """Order GPUs by index: known ones keep theirs, a new one replaces a missing one or is last.

    >>> assign_indexes(["a", "b", "c"], ["a", "c"])
    ['a', 'b', 'c']
    >>> assign_indexes(["a", "b", "c"], ["a", "x", "c", "y"])
    ['a', 'x', 'c', 'y']
    """
    new = [gpu for gpu in found if gpu not in known]
    kept = [gpu if gpu in found or not new else new.pop(0) for gpu in known]
    return kept + new


def _raise_if_driver_changed(error: DriverError) -> None:
    if error.code == LIBRARY_MISMATCH:
        raise DriverChangedError(str(error)) from None


def _profile_shapes(reading: GpuReading) -> list[tuple[object, ...]]:
    return [(p.name, p.size, p.compute, p.starts) for p in reading.profiles]
