"""The agent's own instances, on disk before the driver is asked: what it made, it may destroy.

Each is known by its place (GPU, profile, start) and how far it has got. The stages are fine enough
to tell an instance of ours from one that somebody else made at the same place while we were away:

- ``intent``: about to be made. Ours has no compute instance yet, since that is made later only.
- ``made``: the GPU instance exists and has this id; its compute instance may exist.
- ``whole``: it has been seen with this UUID.
- ``bare``: its compute instance was destroyed, so one that has any is not ours.
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


class Key(NamedTuple):
    """Where an instance is; two cannot be at the same place."""

    gpu: str
    profile: str
    start: int

    def __str__(self) -> str:
        return f"{self.profile or 'an instance of an unknown profile'} at slice {self.start} of " \
               f"{self.gpu}"  # fmt: skip


class Stage(StrEnum):
    """How far an instance has got."""

    INTENT = "intent"
    MADE = "made"
    WHOLE = "whole"
    BARE = "bare"


@dataclass(frozen=True)
class Own:
    """An instance of the agent's."""

    gpu: str
    profile: str
    start: int
    size: int
    allocation: str
    """Whose it is; nothing for one of somebody else's that is being destroyed by order."""
    index: int
    stage: Stage = Stage.INTENT
    id: int | None = None
    """The GPU instance's id; ids are given out again, so it never counts alone."""
    uuid: str = ""

    @property
    def key(self) -> Key:
        """Where it is."""
        return Key(self.gpu, self.profile, self.start)

    def is_it(self, there: InstanceReading) -> bool:
        """Whether what is at its place is this instance, and not a stranger's in its stead."""
        if self.stage is Stage.INTENT:
            return not there.compute
        if self.id != there.id:
            return False
        if self.stage is Stage.WHOLE:
            return not there.compute or self.uuid in {c.uuid for c in there.compute}
        return self.stage is Stage.MADE or not there.compute


class RecordError(SlicewiseError):
    """A file of the agent's cannot be written, or not removed; nothing is made without it."""


class Record:
    """The own instances of this boot, in memory and on disk alike."""

    def __init__(self, folder: Path, boot: str) -> None:
        """Read what there is; entries of an earlier boot are over, as their instances are."""
        self._path = folder / "instances.json"
        self._boot = boot
        self._own: dict[Key, Own] = {}
        self.remark = ""
        """What is to be said about the file that was found."""
        self._read()

    def __iter__(self) -> Iterator[Own]:
        return iter(list(self._own.values()))

    def __len__(self) -> int:
        return len(self._own)

    def get(self, key: Key) -> Own | None:
        """The own instance at that place."""
        return self._own.get(key)

    def put(self, own: Own) -> None:
        """Write an instance down; it counts only once it is on disk."""
        self._write({**self._own, own.key: own})

    def advance(self, key: Key, stage: Stage, id: int | None = None, uuid: str = "") -> None:
        """Write down how far an instance has got."""
        own = self._own[key]
        self.put(replace(own, stage=stage, id=own.id if id is None else id, uuid=uuid or own.uuid))

    def drop(self, key: Key) -> None:
        """Forget an instance that is not there any more."""
        self._write({k: own for k, own in self._own.items() if k != key})

    def _read(self) -> None:
        try:
            written = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise SlicewiseError(f"{str(self._path)!r} cannot be read: {error.strerror}") from None
        try:
            data = json.loads(written.decode())
            found = [_own(item) for item in data["instances"]]
            boot = data["boot"]
        except (ValueError, TypeError, KeyError, AttributeError):
            aside = self._path.with_suffix(".broken")
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            self.remark = (
                f"{str(self._path)!r} is not a record and was put aside as {aside.name!r}: "
                "instances the service does not know by UUID will be foreign"
            )
            return
        if boot != self._boot:
            self.remark = f"the node was restarted; {len(found)} recorded instances are over"
            return
        self._own = {own.key: own for own in found}

    def _write(self, own: dict[Key, Own]) -> None:
        document = {"boot": self._boot, "instances": [asdict(one) for one in own.values()]}
        write_file(self._path, json.dumps(document, indent=1) + "\n")
        self._own = own


def write_file(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file so that it is there whole, and stays, or not at all."""
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


def _own(item: dict[str, object]) -> Own:
    """One entry of the file, checked."""
    own = Own(**{**item, "stage": Stage(str(item["stage"]))})  # type: ignore[arg-type]
    texts = (own.gpu, own.profile, own.allocation, own.uuid)
    numbers = (own.start, own.size, own.index, *(() if own.id is None else (own.id,)))
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("text expected")
    if not all(type(number) is int for number in numbers):
        raise ValueError("number expected")
    if own.id is None and own.stage is not Stage.INTENT:
        raise ValueError("id expected")
    return own
