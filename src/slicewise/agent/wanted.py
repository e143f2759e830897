"""What the service wants on this node, read from its answer and nothing guessed.

Every answer holds the whole of it. An instance is destroyed only where it stands here as to be
absent, or is evicted by name; what is not listed is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from slicewise.agent.record import Key
from slicewise.core.errors import SlicewiseError

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """An instance of an allocation that is to be present, or to be absent."""

    allocation: str
    index: int
    gpu: str
    profile: str
    start: int
    size: int
    present: bool
    uuid: str = ""
    """What the service knows it by: what has this UUID is this instance, whoever made it."""

    @property
    def key(self) -> Key:
        """Where it is."""
        return Key(self.gpu, self.profile, self.start)

    @property
    def part(self) -> tuple[str, int]:
        """Which instance of which allocation."""
        return self.allocation, self.index


@dataclass(frozen=True)
class Evicted:
    """An instance of somebody else's that an operator wants destroyed."""

    gpu: str
    profile: str
    start: int
    uuid: str

    @property
    def key(self) -> Key:
        """Where it is."""
        return Key(self.gpu, self.profile, self.start)


@dataclass(frozen=True)
class Desired:
    """All that is wanted on this node."""

    seq: int = 0
    instances: tuple[Wanted, ...] = ()
    evict: tuple[Evicted, ...] = field(default=())


class AnswerError(SlicewiseError):
    """An answer of the service that cannot be understood; what was wanted before stays."""


def read_desired(body: object) -> Desired:
    """The desired state in an answer; a single doubt refuses all of it."""
    table = _table(body, "the answer")
    return Desired(
        seq=_get(table, "seq", int),
        instances=tuple(_wanted(item) for item in _get(table, "instances", list)),
        evict=tuple(_evicted(item) for item in _get(table, "evict", list, [])),
    )


def _wanted(item: object) -> Wanted:
    table = _table(item, "an instance")
    word = _get(table, "wanted", str)
    if word not in ("present", "absent"):
        raise AnswerError(f"the service wants an instance {word!r}, which this agent does not know")
    return Wanted(
        allocation=_get(table, "allocation", str),
        index=_get(table, "index", int),
        gpu=_get(table, "gpu", str),
        profile=_get(table, "profile", str),
        start=_get(table, "start", int),
        size=_get(table, "size", int),
        present=word == "present",
        uuid=_get(table, "uuid", str, ""),
    )


def _evicted(item: object) -> Evicted:
    table = _table(item, "an eviction")
    return Evicted(
        gpu=_get(table, "gpu", str),
        profile=_get(table, "profile", str),
        start=_get(table, "start", int),
        uuid=_get(table, "uuid", str),
    )


def _table(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise AnswerError(f"{what} of the service is not an object")
    return value


def _get(table: Mapping[str, object], name: str, kind: type[T], default: T | None = None) -> T:
    value = table.get(name, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise AnswerError(f"the service's answer has no proper {name!r}")
    return value
