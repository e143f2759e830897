"""What is on this node: its GPUs by index, each as it was last read, and what is wrong with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slicewise.agent.discovery import Finding, examine, geometry_record, problem
from slicewise.agent.driver import (
    LIBRARY_MISMATCH,
    UNKNOWN,
    Driver,
    DriverError,
    GpuReading,
    Usage,
)
from slicewise.agent.health import Health
from slicewise.agent.seats import Seats
from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")
_MOST_DISAGREEMENTS = 64
SENTENCE = 1000
"""The service takes sentences up to about this length."""


class DriverChangedError(SlicewiseError):
    """The driver was replaced under the agent, which must be started again to talk to it."""


class Node:
    """The GPUs of this node through the driver's eyes."""

    def __init__(self, driver: Driver, seats: Seats, health: Health) -> None:
        self.driver = driver
        self._seats = seats
        self._health = health
        self.gpus: list[str] = []
        """UUIDs by index."""
        self.seen: dict[str, GpuReading] = {}
        """Each GPU as it was last read in full."""
        self.usage: dict[str, Usage] = {}
        self._unread: dict[str, str] = {}
        """GPUs that could not be read last time, and why."""
        self._absent: set[str] = set()
        """GPUs the driver no longer lists."""
        self.silent = ""
        """Why a GPU does not tell its UUID."""
        self.trouble = ""
        """What keeps every GPU from taking new instances."""
        self.remarks: dict[str, str] = {}
        """What else keeps one GPU from taking new instances."""
        self.version = ""
        self._finding: Finding | None = None

    def look(self) -> None:
        """Read everything anew."""
        try:
            self.version = self.driver.version()
            listed = self.driver.gpus()
        except DriverError as error:
            _insist_on_the_same(error)
            for gpu in self.gpus:
                self._unread[gpu] = str(error)
            self._begin_anew()
            if not self.gpus:
                raise
            return
        found = [gpu for gpu in listed if isinstance(gpu, str)]
        errors = [gpu for gpu in listed if isinstance(gpu, DriverError)]
        self.gpus = self._seats.take(found)
        # One that does not tell its UUID is probably one of those that are missing.
        self.silent = str(errors[0]) if errors else ""
        self._absent = set() if errors else {gpu for gpu in self.gpus if gpu not in found}
        for gpu in self.gpus:
            if gpu in found:
                self._read_quietly(gpu)
            else:
                self._unread[gpu] = self.silent or "it is no longer there"
        self._listen()

    def read(self, gpu: str) -> GpuReading:
        """One GPU as it is now."""
        try:
            reading = self.driver.read(gpu)
        except DriverError as error:
            self._unread[gpu] = str(error)
            raise
        if reading.uuid != gpu:
            raise DriverError(UNKNOWN, "nvmlDeviceGetHandleByUUID", f"{gpu} is another GPU now")
        self._unread.pop(gpu, None)
        self.seen[gpu] = reading
        return reading

    def measure(self) -> None:
        """Read how warm and how full the GPUs are, and whether memory errors grew in number."""
        for gpu in self.gpus:
            if gpu in self._unread:
                continue
            try:
                usage = self.driver.usage(gpu)
            except DriverError:
                continue  # The next look says what is wrong.
            self.usage[gpu] = usage
            if usage.uncorrected is not None and self._health.uncorrected(gpu, usage.uncorrected):
                _log.error("%s is sick: %s", gpu, self._health.problem(gpu))

    def is_read(self, gpu: str) -> bool:
        """Whether the last attempt to read a GPU went well."""
        return gpu in self.seen and gpu not in self._unread

    def is_absent(self, gpu: str) -> bool:
        """Whether the driver lists its GPUs and this is none of them."""
        return gpu in self._absent or (gpu not in self.gpus and bool(self.gpus))

    def finding(self) -> Finding | None:
        """What this node's GPUs are; that of the first that tells."""
        if self._finding is None:
            for gpu in self.gpus:
                reading = self.seen.get(gpu)
                if reading is not None and not problem(reading):
                    self._finding = examine(reading)
                    break
        return self._finding

    def problem(self, gpu: str) -> str:
        """Why a GPU is to take no new instances; nothing where it may."""
        told = [self._health.problem(gpu), self._unread.get(gpu, ""), self.remarks.get(gpu, "")]
        reading = self.seen.get(gpu)
        if reading is not None:
            told.append(problem(reading) or self._unlike(reading))
            if reading.pending is not None and reading.pending != reading.mig:
                word = "on" if reading.pending else "off"
                told.append(f"MIG mode will be {word} after a reset of the GPU, which is needed")
        told.append(self.trouble)
        return "; ".join(dict.fromkeys(word for word in told if word))[:SENTENCE]

    def mig(self, gpu: str) -> bool:
        """Whether MIG mode is on, as far as is known."""
        reading = self.seen.get(gpu)
        return reading is not None and reading.mig is True

    def hello(self, boot: str, agent: str) -> dict[str, object] | None:
        """How the agent introduces the node; None while nothing is known of its GPUs."""
        finding = self.finding()
        if finding is None:
            return None
        return {
            "boot": boot,
            "agent": agent,
            "driver": self.version,
            "model": finding.model,
            "geometry": geometry_record(finding.geometry),
            "disagreements": _few(finding.disagreements),
            "gpus": [
                {"uuid": gpu, "mig": self.mig(gpu), "problem": self.problem(gpu)}
                for gpu in self.gpus
            ],
        }

    def _read_quietly(self, gpu: str) -> None:
        before = self._unread.get(gpu)
        try:
            self.read(gpu)
        except DriverError as error:
            if str(error) != before:
                _log.error("%s cannot be read: %s", gpu, error)
        else:
            if before is not None:
                _log.info("%s can be read again", gpu)

    def _unlike(self, reading: GpuReading) -> str:
        """A node has one model: a GPU that offers something else cannot be described."""
        first = next((self.seen[g] for g in self.gpus if g in self.seen and self.seen[g].profiles),
                     reading)  # fmt: skip
        if _offers(first) == _offers(reading):
            return ""
        return f"it is a {reading.name} and offers other profiles than {first.uuid}, a {first.name}"

    def _listen(self) -> None:
        try:
            events = self.driver.events()
        except DriverError:
            return
        for gpu, number in events:
            if gpu and self._health.xid(gpu, number):
                _log.error("%s is sick: %s", gpu, self._health.problem(gpu))
            else:
                _log.warning("%s reported XID %d", gpu or "a GPU that is gone", number)

    def _begin_anew(self) -> None:
        try:
            self.driver.reopen()
        except DriverError as error:
            _insist_on_the_same(error)
            _log.error("the driver does not answer: %s", error)


def _insist_on_the_same(error: DriverError) -> None:
    if error.code == LIBRARY_MISMATCH:
        raise DriverChangedError(str(error)) from None


def _offers(reading: GpuReading) -> list[tuple[object, ...]]:
    return [(p.name, p.size, p.compute, p.starts) for p in reading.profiles]


def _few(sentences: Sequence[str]) -> list[str]:
    shown = [sentence[:SENTENCE] for sentence in sentences]
    if len(shown) <= _MOST_DISAGREEMENTS:
        return shown
    rest = len(shown) - _MOST_DISAGREEMENTS + 1
    return [*shown[: _MOST_DISAGREEMENTS - 1], f"and {rest} more"]
