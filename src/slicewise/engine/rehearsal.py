"""When rehearsals are due, what they found, which candidate wins, and when a choice ends.

A rehearsal simulates candidates on the estimated demand. This module has what does not depend on
how that is done: pure functions of the estimate, the findings and the choice in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slicewise.core.geometry import Geometry
from slicewise.core.request import Request
from slicewise.engine.demand import FEW, WINDOW, DemandEstimate
from slicewise.policies.rehearsed import DEFAULT_CHOICE, Choice

SOON = 100
"""The requests between a switch back to `least-lost` and the next rehearsal, at least."""

FEW_STAYS = 100
"""Fewer lifetimes than that say too little about how long instances stay."""

LONGEST_WAIT = 8 * WINDOW
"""A demand that holds is still rehearsed after so many requests: it may drift slowly."""


class Interval(NamedTuple):
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Finding:
    """What a rehearsal expects of a candidate."""

    choice: Choice
    runs: int
    requests: Interval
    """The share of requests rejected."""
    slices: Interval
    """The share of requested slices rejected."""
    fewer_requests: Interval
    """By how much that is less than under `least-lost`, on the same arrivals."""
    fewer_slices: Interval
    fewer_than_used: Interval
    """By how much fewer requests it rejects than the choice in force, on the same arrivals."""


@dataclass(frozen=True)
class Standing:
    """The choice in force, and what was known when it was made."""

    choice: Choice = DEFAULT_CHOICE
    requests: int = 0
    """How many requests the estimate had seen."""
    changes: int = 0
    """How often the demand had changed."""
    rehearsed: bool = False
    """Whether a rehearsal made it: false at the start and after a switch back."""


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found."""

    standing: Standing
    """The winner."""
    why: str
    load: float
    """Offered slices, as a share of the cluster."""
    findings: tuple[Finding, ...]
    """One for each candidate, `least-lost` first."""


def due(demand: DemandEstimate, standing: Standing) -> bool:
    """Return whether to rehearse now.

    The intervals double while the demand holds. After a change, the next rehearsal is due as soon
    as enough is known of the new demand.
    """
    if demand.steady_for < FEW or len(demand.stays) < FEW_STAYS or not demand.running:
        return False
    since = demand.requests - standing.requests
    if not standing.rehearsed or demand.changes != standing.changes:
        return since >= SOON
    return since >= min(demand.steady_for / 2, LONGEST_WAIT)


def switch_back(
    demand: DemandEstimate, standing: Standing, request: Request, geometries: Iterable[Geometry]
) -> tuple[Standing, str] | None:
    """Return to `least-lost` before this request is decided, and why; None if the choice holds."""
    if standing.choice == DEFAULT_CHOICE:
        return None
    if demand.changes != standing.changes:
        why = "the demand has changed since the rehearsal"
    elif not standing.choice.covers(request, geometries):
        why = f"{request} was not asked for when it was rehearsed"
    else:
        return None
    return Standing(DEFAULT_CHOICE, demand.requests, demand.changes), why


def still_holds(
    rehearsal: Rehearsal,
    demand: DemandEstimate,
    standing: Standing,
    geometries: Sequence[Geometry],
) -> bool:
    """Return whether a finished rehearsal may take effect.

    It may not if the demand changed meanwhile, if something was asked for that it did not know, or
    if a later choice was made.
    """
    made = rehearsal.standing
    return (
        standing.requests <= made.requests <= demand.requests
        and made.changes == demand.changes
        and all(made.choice.covers(request, geometries) for request in demand.asked_for)
    )


def winner(findings: Sequence[Finding], in_force: Choice) -> tuple[Finding, str]:
    """Return the finding whose choice to use, and why.

    `least-lost`, the first finding, stays unless another one surely rejects fewer requests and no
    more slices. The choice in force was surely better before: it may stay while it seems so, and
    does unless the best is surely better than it.
    """
    used = next((each for each in findings[1:] if each.choice.name == in_force.name), None)
    better = [
        each
        for each in findings[1:]
        if each.fewer_slices.value >= 0
        and (each.fewer_requests.low > 0 or (each is used and each.fewer_requests.value > 0))
    ]
    if not better:
        return findings[0], "no other table surely rejects fewer requests and no more slices"
    best = max(better, key=lambda each: each.fewer_requests.value)
    if used in better and best is not used and best.fewer_than_used.low <= 0:
        return used, f"{used.choice.name} is in use, and none is surely better"
    return best, "it surely rejects fewer requests and no more slices than least-lost"
