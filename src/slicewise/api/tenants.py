"""Tenants and their tokens."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from slicewise.api.base import Body, Cursor, Duration, Moment, Name, Priority, Text, View
from slicewise.journal.entries import Role

Limit = Annotated[int, Meta(ge=0, le=1 << 40)]
Rate = Annotated[float, Meta(gt=0, le=1e6)]
Weight = Annotated[float, Meta(ge=0.001, le=1e6)]


class Quota(Body, frozen=True):
    """The terms of a tenant: its limits, where null is no limit, and its share."""

    memory_slices: Limit | None = None
    """Memory slices that it may hold at a time."""
    compute_slices: Limit | None = None
    instances: Limit | None = None
    requests_per_second: Rate | None = None
    max_priority: Priority = 0
    """Priorities up to this one count against other tenants; all order its own requests."""
    weight: Weight = 1.0
    """Its share when several tenants wait, relative to theirs."""
    guarantee: Limit = 0
    """Memory slices within which its requests come first; at most `memory_slices`."""
    default_lease_seconds: Duration | None = None
    """The lease of a request that asks for none."""
    max_lease_seconds: Duration | None = None
    """The longest lease; without a default, requests that ask for none get this one."""


class QuotaPatch(Body, frozen=True):
    """Changes of a tenant's terms: fields left out stay as they are, null removes a limit."""

    memory_slices: Limit | UnsetType | None = UNSET
    compute_slices: Limit | UnsetType | None = UNSET
    instances: Limit | UnsetType | None = UNSET
    requests_per_second: Rate | UnsetType | None = UNSET
    max_priority: Priority | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET
    guarantee: Limit | UnsetType = UNSET
    default_lease_seconds: Duration | UnsetType | None = UNSET
    max_lease_seconds: Duration | UnsetType | None = UNSET


class TenantBody(Body, frozen=True):
    """A tenant to create."""

    name: Name
    quota: Quota = Quota()


class TenantPatch(Body, frozen=True):
    """Changes of a tenant."""

    quota: QuotaPatch


class UsageView(View, frozen=True):
    """What a tenant holds."""

    memory_slices: int
    compute_slices: int
    instances: int
    waiting: int


class TenantView(View, frozen=True):
    """A tenant."""

    id: str
    """Identifies the tenant. Unlike the name, it is never used again."""
    name: str
    quota: Quota
    usage: UsageView


class TenantPage(View, frozen=True):
    """A page of tenants, by name."""

    tenants: tuple[TenantView, ...]
    next: Cursor


class TokenBody(Body, frozen=True):
    """A token to issue."""

    role: Role
    tenant: Name | None = None
    node: Name | None = None
    note: Text = ""
    expires_in_seconds: Duration | None = None


class RotateBody(Body, frozen=True):
    """How to replace a token by another one with the same rights."""

    overlap_seconds: Annotated[float, Meta(ge=0, le=90 * 86400)] = 3600
    """How long the old token stays valid."""
    expires_in_seconds: Duration | None = None
    """When the new token expires; by default, when the old one would have."""


class TokenView(View, frozen=True):
    """A token, without its secret."""

    id: str
    role: Role
    tenant: str | None
    node: str | None
    note: str
    expires_at: Moment | None


class NewTokenView(TokenView, frozen=True):
    """A new token; its secret is shown only this once."""

    token: str


class TokenPage(View, frozen=True):
    """A page of tokens, by id."""

    tokens: tuple[TokenView, ...]
    next: Cursor


class WhoView(View, frozen=True):
    """The token that made the request."""

    id: str
    role: Role
    tenant: str | None
    node: str | None
    note: str
    expires_at: Moment | None
