"""Health, readiness and the service's clock."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from slicewise.api.base import Body, Moment, View


class Health(View, frozen=True):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(View, frozen=True):
    """Whether this process can serve."""

    ready: bool
    role: Literal["leading", "following", "starting", "stopping"]
    leader: str | None
    """The address that takes writes."""
    seq: int
    """The last entry known to this process."""
    problems: tuple[str, ...]
    history: str = ""
    """The id of the journal's history; events after HISTORY-SEQ are new ones."""
    warnings: tuple[str, ...] = ()
    """Conditions that an operator should check; the process serves nevertheless."""


class ClockView(View, frozen=True):
    """Service time and the wall clock of the process that answers."""

    service_time: Moment
    """The time that leases, deadlines and the journal use."""
    wall_time: Moment
    step_seconds: float
    """How far the wall clock is ahead of service time; negative if behind."""
    held: bool
    """Whether this is a step, which service time does not follow."""


class ClockStepBody(Body, frozen=True):
    """The observed step to accept; refused if the wall clock has moved since."""

    step_seconds: Annotated[float, Meta(ge=-1e10, le=1e10)]


class ClockStepView(View, frozen=True):
    """An accepted step: service time before and after it."""

    before: Moment
    after: Moment
    step_seconds: float
