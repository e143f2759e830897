"""Structures and formats that all kinds share: metadata, lists, watches, errors, timestamps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Generic, TypeVar

import msgspec

from slicewise.journal.entries import Seconds


class ApiObject(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """Base class: immutable, with camel-case names on the wire."""


class OwnerReference(ApiObject, frozen=True):
    """The owner of an object."""

    kind: str
    name: str
    uid: str
    controller: bool = False


class Meta(ApiObject, frozen=True):
    """The metadata of an object."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def key(self) -> str:
        """Namespace and name: unique among the objects of a kind."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Condition(ApiObject, frozen=True):
    """A condition of an object."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


# Selecting nodes


class Requirement(ApiObject, frozen=True):
    """A condition on a label or a field of a node."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeTerm(ApiObject, frozen=True):
    """Requirements that must all hold."""

    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class NodeSelector(ApiObject, frozen=True):
    """Terms of which at least one must hold."""

    node_selector_terms: tuple[NodeTerm, ...] = ()


class LabelSelector(ApiObject, frozen=True):
    """Requirements on labels that must all hold."""

    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[Requirement, ...] = ()


# Lists and watches

Item = TypeVar("Item")


class ListMeta(ApiObject, frozen=True):
    """The version of a list, and the token of its next page."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class ListOf(msgspec.Struct, Generic[Item], frozen=True):
    """A page of a list."""

    metadata: ListMeta
    items: list[Item] = []


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch; its object is decoded later."""

    type: str
    object: msgspec.Raw


class Status(ApiObject, frozen=True):
    """The body of an error response."""

    message: str = ""
    reason: str = ""
    code: int = 0


# Timestamps


def now_text() -> str:
    """The current time in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_precise() -> str:
    """The current time in microseconds, the format of leases and events."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str | None, default: Seconds) -> Seconds:
    """A timestamp in seconds since the epoch."""
    return default if text is None else datetime.fromisoformat(text).timestamp()
