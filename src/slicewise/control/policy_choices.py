"""Decides which table places requests: after rehearsals, and when demand turns out otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from slicewise.api.base import View
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import ChoosePolicy, KeepLeastLost
from slicewise.control.state import State
from slicewise.core.request import Request
from slicewise.engine.rehearsal import Finding, Rehearsal, Standing, still_holds, switch_back
from slicewise.journal.policy_entries import ChoiceRecord, PolicyChosen, RehearsalRecord
from slicewise.policies.rehearsed import DEFAULT_CHOICE, FORMS, Choice, Rehearsed


class ChosenView(View, frozen=True):
    """The answer to a rehearsal: the table that decides from now on."""

    table: str
    why: str


class Recorder(Protocol):
    """Applies entries to a state and records them."""

    @property
    def state(self) -> State:
        """The state."""

    def enter(self, entry: PolicyChosen) -> None:
        """Apply an entry and record it."""


class PolicyChoices:
    """Chooses tables by what rehearsals found, and returns to `least-lost`."""

    def __init__(self, work: Recorder) -> None:
        self._work = work
        self._state = work.state

    def choose(self, command: ChoosePolicy) -> Answer:
        """Use the winner of a rehearsal, unless it is out of date."""
        state, rehearsal = self._state, command.rehearsal
        if not state.policy.rehearses:
            raise RefusedError(
                409, f"policy {state.scheduler.policy.name!r} does not change by rehearsals"
            )
        problem = _problem(state, rehearsal)
        if problem is not None:
            raise RefusedError(409, f"the rehearsal is not usable: {problem}", reason="unusable")
        if not still_holds(
            rehearsal,
            state.demand.estimate,
            state.policy.standing,
            tuple(state.geometries.values()),
        ):
            sentence = "the rehearsal is out of date: the demand or the choice has changed since"
            raise RefusedError(409, sentence, reason="stale")
        record = msgspec.convert(rehearsal, RehearsalRecord, from_attributes=True)
        return self._enter(rehearsal.standing, rehearsal.why, record)

    def keep_least_lost(self, command: KeepLeastLost) -> Answer:
        """Return to `least-lost` because nothing is rehearsed."""
        estimate = self._state.demand.estimate
        return self._enter(
            Standing(DEFAULT_CHOICE, estimate.requests, estimate.changes), command.why
        )

    def before(self, asked: Request) -> None:
        """Return to `least-lost` before a request is decided that the choice is not made for."""
        back = way_back(self._state, asked)
        if back is not None:
            self._enter(*back)

    def _enter(
        self, standing: Standing, why: str, rehearsal: RehearsalRecord | None = None
    ) -> Answer:
        record = msgspec.convert(standing.choice, ChoiceRecord, from_attributes=True)
        self._work.enter(PolicyChosen(record, why, standing.requests, standing.changes, rehearsal))
        return json_answer(200, ChosenView(table=standing.choice.name, why=why))


def way_back(state: State, asked: Request) -> tuple[Standing, str] | None:
    """Return the standing with which a request is decided, and why; None for the one in force."""
    if not state.policy.rehearses or state.policy.standing.choice == DEFAULT_CHOICE:
        return None
    request = state.demand.request_for(asked)
    if request is None:
        return None
    return switch_back(
        state.demand.estimate, state.policy.standing, request, state.geometries.values()
    )


@contextmanager
def deciding_as_for(state: State, asked: Request) -> Iterator[Choice | None]:
    """Let the table decide for a while that a request would be decided by; nothing is entered.

    Yields the choice; None under a policy that is not chosen by rehearsals.
    """
    policy = state.scheduler.policy
    if not isinstance(policy, Rehearsed):
        yield None
        return
    back = way_back(state, asked)
    choice = state.policy.standing.choice if back is None else back[0].choice
    policy.use(choice)
    try:
        yield choice
    finally:
        policy.use(state.policy.standing.choice)


def _problem(state: State, rehearsal: Rehearsal) -> str | None:
    """Return what is wrong with a rehearsal that no rehearsal can have found."""
    findings = rehearsal.findings
    if not findings or findings[0].choice != DEFAULT_CHOICE:
        return "the first finding is not that of least-lost"
    if rehearsal.standing.choice not in {finding.choice for finding in findings}:
        return "the winner is not among the candidates"
    if not math.isfinite(rehearsal.load):
        return "the load is not a number"
    return next((p for f in findings if (p := _problem_of(state, f)) is not None), None)


def _problem_of(state: State, finding: Finding) -> str | None:
    choice = finding.choice
    intervals = (
        finding.requests,
        finding.slices,
        finding.fewer_requests,
        finding.fewer_slices,
        finding.fewer_than_used,
    )
    if not all(map(math.isfinite, (figure for interval in intervals for figure in interval))):
        return f"a figure of {choice.name} is not a number"
    return _problem_with(state, choice)


def _problem_with(state: State, choice: Choice) -> str | None:
    if choice.form not in FORMS:
        return f"no form of table is named {choice.form!r}"
    if not 0 <= choice.mean_lifetime < math.inf:
        return f"a mean lifetime of {choice.mean_lifetime} seconds"
    plain = {p.name for g in state.geometries.values() for p in g.plain_profiles}
    named = {*choice.asked_for, *(name for name, _ in choice.weights)}
    if not plain.issuperset(named):
        return f"no GPU of the cluster has {', '.join(sorted(named - plain))}"
    if not all(0 <= weight < math.inf for _, weight in choice.weights):
        return f"a weight of {choice.name} is no factor"
    return None
