"""A desk to try things at, without threads or files: commands in, answers and rows out."""

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
from slicewise.control.desk import Desk
from slicewise.control.entries import QuotaRecord, Row, Seconds, Want
from slicewise.control.geometries import record_of
from slicewise.control.state import State
from slicewise.engine.queue import Discipline

A100 = record_of(load_geometry("A100-80GB"))
A30 = record_of(load_geometry("A30"))


class Office:
    """A desk, the time, and every row it ever wrote."""

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
        self.desk = Desk(self.state, lambda letter: f"{letter}{next(ids)}")
        self.rows: list[Row] = []
        self.now: Seconds = 1000.0

    def fresh(self) -> State:
        """A state that knows nothing yet."""
        return State(self.policy, self.discipline)

    def ask(self, command: Command) -> tuple[int, Any]:
        """One command, then whatever the queue makes of it."""
        self.desk.pass_time(self.now)
        answer = self.desk.decide(command, internal("tester"), self.now)
        self.desk.serve_queue(self.now)
        self.rows += self.desk.take_rows()
        return answer.status, msgspec.json.decode(answer.body)

    def wait(self, seconds: Seconds) -> list[Row]:
        """Let time pass; returns what it brought."""
        self.now += seconds
        self.desk.pass_time(self.now)
        self.desk.serve_queue(self.now)
        rows = self.desk.take_rows()
        self.rows += rows
        return rows

    # The usual commands, short

    def tenant(self, name: str = "acme", **quota: Any) -> None:
        """A tenant, which must be new."""
        status, _ = self.ask(SetTenant(name, QuotaRecord(**quota), new=True))
        assert status == 201

    def node(self, name: str = "n0", gpus: int = 1, geometry: Any = A100) -> dict[str, Any]:
        """A node, which must be new."""
        status, body = self.ask(AddNode(name, geometry, gpus))
        assert status == 201, body
        assert isinstance(body, dict)
        return body

    def create(self, profile: str, tenant: str = "acme", **terms: Any) -> tuple[int, Any]:
        """An allocation."""
        return self.ask(Create(tenant, Terms(Want(profile=profile), **terms)))

    def release(self, identity: str) -> tuple[int, Any]:
        """End one."""
        return self.ask(Release(identity))
