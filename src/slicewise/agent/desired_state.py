"""The desired state of this node, parsed strictly from the service's answer.

Every answer holds the complete desired state. An instance is destroyed only if it is listed as
absent or evicted by UUID; instances that are not listed are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from slicewise.agent.record import InstanceKey
from slicewise.core.errors import SlicewiseError

T = TypeVar("T")


@dataclass(frozen=True)
class DesiredInstance:
    """An instance of an allocation that should be present or absent."""

    allocation: str
    index: int
    gpu: str
    profile: str
    start: int
    size: int
    present: bool
    uuid: str = ""
    """The UUID known to the service; the instance with this UUID matches, whatever created it."""
    notice: str = ""
    """When it becomes absent because its slices are reclaimed; empty if no time is known."""

    @property
    def key(self) -> InstanceKey:
        """The place of the instance."""
        return InstanceKey(self.gpu, self.profile, self.start)

    @property
    def part(self) -> tuple[str, int]:
        """The allocation and the index of the instance in it."""
        return self.allocation, self.index


@dataclass(frozen=True)
class Eviction:
    """A foreign instance that an operator wants destroyed."""

    gpu: str
    profile: str
    start: int
    uuid: str

    @property
    def key(self) -> InstanceKey:
        """The place of the instance."""
        return InstanceKey(self.gpu, self.profile, self.start)


@dataclass(frozen=True)
class Desired:
    """The complete desired state of this node."""

    seq: int = 0
    instances: tuple[DesiredInstance, ...] = ()
    evict: tuple[Eviction, ...] = field(default=())


class AnswerError(SlicewiseError):
    """Raised for a malformed answer of the service; the previous desired state stays in force."""


def parse_desired(body: object) -> Desired:
    """Parse an answer into the desired state; one invalid field rejects all of it."""
    table = _table(body, "the answer")
    return Desired(
        seq=_get(table, "seq", int),
        instances=tuple(_parse_instance(item) for item in _get(table, "instances", list)),
        evict=tuple(_parse_eviction(item) for item in _get(table, "evict", list, [])),
    )


def _parse_instance(item: object) -> DesiredInstance:
    table = _table(item, "an instance")
    word = _get(table, "wanted", str)
    if word not in ("present", "absent"):
        raise AnswerError(f"the service sent {word!r} where 'present' or 'absent' was expected")
    return DesiredInstance(
        allocation=_get(table, "allocation", str),
        index=_get(table, "index", int),
        gpu=_get(table, "gpu", str),
        profile=_get(table, "profile", str),
        start=_get(table, "start", int),
        size=_get(table, "size", int),
        present=word == "present",
        uuid=_get(table, "uuid", str, ""),
        notice=_get(table, "notice", str, ""),
    )


def _parse_eviction(item: object) -> Eviction:
    table = _table(item, "an eviction")
    return Eviction(
        gpu=_get(table, "gpu", str),
        profile=_get(table, "profile", str),
        start=_get(table, "start", int),
        uuid=_get(table, "uuid", str),
    )


def _table(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise AnswerError(f"{what} from the service is not an object")
    return value


def _get(table: Mapping[str, object], name: str, kind: type[T], default: T | None = None) -> T:
    value = table.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise AnswerError(f"the service's answer has no valid {name!r}")
    return value
