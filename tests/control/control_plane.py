"""A control plane for tests, without threads or files: commands in, answers and rows out."""

from __future__ import annotations

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
from slicewise.engine.reclaim import ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import QuotaRecord, Row, Seconds, Want, decode, encode

A100 = record_of(load_geometry("A100-80GB"))
A30 = record_of(load_geometry("A30"))


class ControlPlane:
    """A command handler, a clock, and all rows written."""

    def __init__(
        self,
        policy: str = "default",
        rules: ReservationRules | None = None,
        state: State | None = None,
        first_id: int = 0,
        lease_warning: Seconds = 0,
        reclaim: ReclaimRules | None = None,
    ) -> None:
        self.policy = policy
        self.lease_warning = lease_warning
        self.rules = rules or ReservationRules()
        self.state = state or self.fresh()
        self.used_ids = first_id
        self.handler = CommandHandler(self.state, self._new_id, rules=self.rules, reclaim=reclaim)
        self.actor = internal("tester")
        self.rows: list[Row] = []
        self.now: Seconds = 1000.0

    def _new_id(self, letter: str) -> str:
        self.used_ids += 1
        return f"{letter}{self.used_ids - 1}"

    def fresh(self) -> State:
        """Return an empty state."""
        return State(self.policy, lease_warning=self.lease_warning)

    def ask(self, command: Command) -> tuple[int, Any]:
        """Decide a command and serve the queue; return the status and the decoded body."""
        self.handler.expire(self.now)
        answer = self.handler.decide(command, self.actor, self.now)
        self.handler.serve_queue(self.now)
        self.take_rows()
        return answer.status, msgspec.json.decode(answer.body)

    def wait(self, seconds: Seconds) -> list[Row]:
        """Let time pass, and return the rows that this caused."""
        self.now += seconds
        self.handler.expire(self.now)
        self.handler.serve_queue(self.now)
        return self.take_rows()

    def take_rows(self) -> list[Row]:
        """Return the rows written since the last call; all of them can be read again."""
        rows = self.handler.take_rows()
        for row in rows:
            assert decode(encode(row.entry)) == row.entry
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
