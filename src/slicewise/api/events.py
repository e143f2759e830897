"""Events: the journal's entries as the API shows them."""

from __future__ import annotations

from slicewise.api.base import Cursor, Moment, View
from slicewise.journal.entries import AnyEntry, Role


class EventView(View, frozen=True):
    """A journal entry."""

    seq: int
    at: Moment
    actor: str
    """The id of the token that made the request, or the part of the service that acted."""
    kind: str
    tenant: str | None
    """The name of the tenant that it concerns."""
    subject: str
    entry: AnyEntry
    tenant_id: str | None = None
    """The id of that tenant."""
    role: Role | None = None
    """The role of that token, if known."""
    note: str = ""
    """The note the token was issued with."""
    origin: str = ""
    """The client's address; empty if the service acted by itself, and for tenants."""


class EventPage(View, frozen=True):
    """A page of the journal, newest first."""

    events: tuple[EventView, ...]
    next: Cursor
