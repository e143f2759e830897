"""A control plane for tests, without threads or files: commands in, answers and rows out."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from slicewise import load_geometry
from slicewise.control.actors import internal
from slicewise.control.commands import (
    AddNode,
    Command,
    Create,
    Release,
    SetTenant,
    Terms,
)
from slicewise.control.geometries import record_of
from slicewise.control.handler import CommandHandler
from slicewise.control.state import State
from slicewise.engine.queue import Discipline
from slicewise.journal.entries import QuotaRecord, Row, Seconds, Want

A100 = record_of(load_geometry("A100-80GB"))
A30 = record_of(load_geometry("A30"))


class ControlPlane:
    """A command handler, a clock, and all rows written."""

    def __init__(
        self,
        policy: str = "default",
        discipline: Discipline | None = None,
        state: State | None = None,
        first_id: int = 0,
    ) -> None:
        self.policy = policy
        self.discipline = discipline or Discipline(backfill=4, overtakes=3)
        self.state = state or self.fresh()
        ids = itertools.count(first_id)
        self.handler = CommandHandler(self.state, lambda letter: f"{letter}{next(ids)}")
        self.rows: list[Row] = []
        self.now: Seconds = 1000.0

    def fresh(self) -> State:
        """Return an empty state."""
        return State(self.policy, self.discipline)

    def ask(self, command: Command) -> tuple[int, Any]:
        """Decide a command and serve the queue; return the status and the decoded body."""
        self.handler.expire(self.now)
        answer = self.handler.decide(command, internal("tester"), self.now)
        self.handler.serve_queue(self.now)
        self.rows += self.handler.take_rows()
        return answer.status, msgspec.json.decode(answer.body)

    def wait(self, seconds: Seconds) -> list[Row]:
        """Let time pass, and return the rows that this caused."""
        self.now += seconds
        self.handler.expire(self.now)
        self.handler.serve_queue(self.now)
        rows = self.handler.take_rows()
        self.rows += rows
        return rows

    # Common commands

    def tenant(self, name: str = "acme", **quota: Any) -> None:
        """Create a tenant."""
        status, _ = self.ask(SetTenant(name, QuotaRecord(**quota), new=True))
        assert status == 201

    def node(self, name: str = "n0", gpus: int = 1, geometry: Any = A100) -> dict[str, Any]:
        """Add a node."""
        status, body = self.ask(AddNode(name, geometry, gpus))
        assert status == 201, body
        assert isinstance(body, dict)
        return body

    def create(self, profile: str, tenant: str = "acme", **terms: Any) -> tuple[int, Any]:
        """Request an allocation."""
        return self.ask(Create(tenant, Terms(Want(profile=profile), **terms)))

    def release(self, identity: str) -> tuple[int, Any]:
        """Release an allocation."""
        return self.ask(Release(identity))
