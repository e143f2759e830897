"""The entry about the table that places requests, and what a rehearsal found."""

from __future__ import annotations

from typing import NamedTuple

from slicewise.journal.records import Entry, Record


class ChoiceRecord(Record, frozen=True):
    """A choice of table; see `policies.rehearsed.Choice`."""

    form: str = "least-lost"
    asked_for: tuple[str, ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    leases: bool = False
    mean_lifetime: float = 0.0


class IntervalRecord(NamedTuple):
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


class FindingRecord(Record, frozen=True):
    """What a rehearsal expects of a candidate; see `engine.rehearsal.Finding`."""

    choice: ChoiceRecord
    runs: int
    requests: IntervalRecord
    slices: IntervalRecord
    fewer_requests: IntervalRecord
    fewer_slices: IntervalRecord
    fewer_than_used: IntervalRecord


class RehearsalRecord(Record, frozen=True):
    """A finished rehearsal."""

    load: float
    """Offered slices, as a share of the cluster."""
    findings: tuple[FindingRecord, ...]
    """One for each candidate, `least-lost` first."""


class PolicyChosen(Entry, frozen=True, tag="policy-chosen"):
    """A rehearsal confirmed or changed the table that places requests, or it was given up."""

    choice: ChoiceRecord
    why: str
    requests: int
    """How many requests the estimate of the demand had seen."""
    changes: int
    """How often the demand had changed."""
    rehearsal: RehearsalRecord | None = None
    """What was found; None if no rehearsal made this choice."""
