"""What objects of all kinds have in common, and how the API lists, watches and refuses."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec


class ApiObject(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """What all of them are: immutable, with the API's own names on the wire."""


class OwnerReference(ApiObject, frozen=True):
    """Whom an object belongs to."""

    kind: str
    name: str
    uid: str
    controller: bool = False


class Meta(ApiObject, frozen=True):
    """What every object has."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[OwnerReference, ...] = ()

    @property
    def key(self) -> str:
        """Its name among all of its kind."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name


class Condition(ApiObject, frozen=True):
    """A condition of an object."""

    type: str
    status: str
    reason: str = ""
    message: str = ""


# Selecting nodes


class Requirement(ApiObject, frozen=True):
    """One condition on labels or fields."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeTerm(ApiObject, frozen=True):
    """Conditions that must all hold."""

    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class NodeSelector(ApiObject, frozen=True):
    """Terms of which one must hold."""

    node_selector_terms: tuple[NodeTerm, ...] = ()


# Lists and watches

Item = TypeVar("Item")


class ListMeta(ApiObject, frozen=True):
    """Where a list stands."""

    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class ListOf(msgspec.Struct, Generic[Item], frozen=True):
    """A page of objects."""

    metadata: ListMeta
    items: list[Item] = []


class Happening(msgspec.Struct, frozen=True):
    """One line of a watch; the object is decoded once it is known what it is."""

    type: str
    object: msgspec.Raw


class Status(ApiObject, frozen=True):
    """What the API says when it refuses."""

    message: str = ""
    reason: str = ""
    code: int = 0
