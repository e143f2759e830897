"""The agent's record of its own instances, written to disk before the driver is called.

The agent destroys only recorded instances. An entry has a place (GPU, profile, start) and a stage.
The stage tells an own instance from a foreign one created at the same place while the agent was
not running:

- ``intent``: about to be created. The own instance has no compute instance yet.
- ``created``: the GPU instance exists with the recorded id; its compute instance may exist.
- ``complete``: the compute instance was seen with the recorded UUID.
- ``bare``: the compute instance was destroyed. An instance that has one is foreign.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from slicewise.agent.driver import InstanceReading
from slicewise.core.errors import SlicewiseError


class InstanceKey(NamedTuple):
    """The place of an instance: GPU, profile and start."""

    gpu: str
    profile: str
    start: int

    def __str__(self) -> str:
        profile = self.profile or "an instance of an unknown profile"
        return f"{profile} at slice {self.start} of {self.gpu}"


class Stage(StrEnum):
    """The last recorded step in the life of an instance."""

    INTENT = "intent"
    CREATED = "created"
    COMPLETE = "complete"
    BARE = "bare"


@dataclass(frozen=True)
class RecordedInstance:
    """An instance that the agent created, adopted, or evicts."""

    gpu: str
    profile: str
    start: int
    size: int
    allocation: str
    """The allocation it belongs to; empty for a foreign instance that is being evicted."""
    index: int
    stage: Stage = Stage.INTENT
    id: int | None = None
    """Id of the GPU instance. The driver reuses ids, so an equal id proves nothing by itself."""
    uuid: str = ""

    @property
    def key(self) -> InstanceKey:
        """The place of the instance."""
        return InstanceKey(self.gpu, self.profile, self.start)

    @property
    def part(self) -> tuple[str, int]:
        """The allocation and the index of the instance in it."""
        return self.allocation, self.index

    def matches(self, reading: InstanceReading) -> bool:
        """Whether the instance found at this place is the recorded one, not a foreign one."""
        if self.stage is Stage.INTENT:
            return not reading.compute
        if self.id != reading.id:
            return False
        if self.stage is Stage.COMPLETE:
            return not reading.compute or self.uuid in {c.uuid for c in reading.compute}
        return self.stage is Stage.CREATED or not reading.compute


class RecordError(SlicewiseError):
    """Raised when a file of the agent cannot be written or removed."""


class Record:
    """The recorded instances of the current boot, in memory and on disk."""

    def __init__(self, folder: Path, boot: str) -> None:
        """Load the record; entries of an earlier boot are dropped, as their instances are gone."""
        self._path = folder / "instances.json"
        self._boot = boot
        self._instances: dict[InstanceKey, RecordedInstance] = {}
        self.warning = ""
        """Why entries of the file were not used; empty if they were."""
        self._load()

    def __iter__(self) -> Iterator[RecordedInstance]:
        return iter(list(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, key: InstanceKey) -> RecordedInstance | None:
        """The recorded instance at this place."""
        return self._instances.get(key)

    def put(self, instance: RecordedInstance) -> None:
        """Record an instance. On RecordError the record is unchanged."""
        self._save({**self._instances, instance.key: instance})

    def advance(
        self, key: InstanceKey, stage: Stage, id: int | None = None, uuid: str = ""
    ) -> None:
        """Record a new stage of an instance."""
        old = self._instances[key]
        self.put(replace(old, stage=stage, id=old.id if id is None else id, uuid=uuid or old.uuid))

    def drop(self, key: InstanceKey) -> None:
        """Remove an instance that no longer exists."""
        self._save({k: instance for k, instance in self._instances.items() if k != key})

    def _load(self) -> None:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise SlicewiseError(f"{str(self._path)!r} cannot be read: {error.strerror}") from None
        try:
            data = json.loads(content.decode())
            found = [_parse(item) for item in data["instances"]]
            boot = data["boot"]
        except (ValueError, TypeError, KeyError, AttributeError):
            aside = self._path.with_suffix(".broken")
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            self.warning = (
                f"{str(self._path)!r} is not a valid record and was renamed to {aside.name!r}; "
                "instances that the service does not know by UUID are reported as foreign"
            )
            return
        if boot != self._boot:
            self.warning = f"the node was restarted: dropped {len(found)} recorded instances"
            return
        self._instances = {instance.key: instance for instance in found}

    def _save(self, instances: dict[InstanceKey, RecordedInstance]) -> None:
        entries = [asdict(instance) for instance in instances.values()]
        document = {"boot": self._boot, "instances": entries}
        write_file(self._path, json.dumps(document, indent=1) + "\n")
        self._instances = instances


def write_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file atomically and durably."""
    draft = path.with_name(f".{path.name}.new")
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            data = memoryview(text.encode())
            while data:
                data = data[os.write(file, data) :]
            os.fchmod(file, mode)
            os.fsync(file)
        finally:
            os.close(file)
        draft.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise RecordError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def _parse(item: dict[str, object]) -> RecordedInstance:
    """Parse and check one entry of the file."""
    instance = RecordedInstance(**{**item, "stage": Stage(str(item["stage"]))})  # type: ignore[arg-type]
    texts = (instance.gpu, instance.profile, instance.allocation, instance.uuid)
    numbers = [instance.start, instance.size, instance.index]
    if instance.id is not None:
        numbers.append(instance.id)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("text expected")
    if not all(type(number) is int for number in numbers):
        raise ValueError("number expected")
    if instance.id is None and instance.stage is not Stage.INTENT:
        raise ValueError("id expected")
    return instance
