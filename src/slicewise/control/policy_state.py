"""The part of the state about the table that places requests: which, why and since when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from slicewise.engine.rehearsal import Standing
from slicewise.journal.entries import Row, Seconds
from slicewise.journal.policy_entries import ChoiceRecord, PolicyChosen, RehearsalRecord
from slicewise.policies.rehearsed import Choice, Rehearsed

if TYPE_CHECKING:
    from slicewise.control.state import State


class PolicySnapshot(msgspec.Struct, frozen=True):
    """All of a policy state."""

    chosen: PolicyChosen | None = None
    since: Seconds | None = None
    rehearsal: RehearsalRecord | None = None
    rehearsed_at: Seconds | None = None
    switches: int = 0


class PolicyState:
    """The choice in force. It takes effect under the policy `rehearsed`, and is kept under any."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.standing = Standing()
        self.chosen: PolicyChosen | None = None
        """The entry of the choice in force."""
        self.since: Seconds | None = None
        """When this table began to place requests; None at the beginning."""
        self.rehearsal: RehearsalRecord | None = None
        """What the last rehearsal found."""
        self.rehearsed_at: Seconds | None = None
        self.switches = 0
        """How often the table has changed."""

    @property
    def rehearses(self) -> bool:
        """Whether the policy is the one whose table rehearsals choose."""
        return isinstance(self._state.scheduler.policy, Rehearsed)

    def chose(self, entry: PolicyChosen, row: Row) -> None:
        """Apply an entry."""
        choice = as_choice(entry.choice)
        if choice != self.standing.choice:
            self.since = row.at
            self.switches += 1
            self._state.demand.begin_count()
        self._use(entry, choice)
        if entry.rehearsal is not None:
            self.rehearsal, self.rehearsed_at = entry.rehearsal, row.at

    def snapshot(self) -> PolicySnapshot:
        """Return everything that `restore` needs."""
        return PolicySnapshot(
            self.chosen, self.since, self.rehearsal, self.rehearsed_at, self.switches
        )

    def restore(self, snapshot: PolicySnapshot) -> None:
        """Continue from a snapshot."""
        if snapshot.chosen is not None:
            self._use(snapshot.chosen, as_choice(snapshot.chosen.choice))
        self.since = snapshot.since
        self.rehearsal, self.rehearsed_at = snapshot.rehearsal, snapshot.rehearsed_at
        self.switches = snapshot.switches

    def _use(self, entry: PolicyChosen, choice: Choice) -> None:
        self.chosen = entry
        rehearsed = entry.rehearsal is not None
        self.standing = Standing(choice, entry.requests, entry.changes, rehearsed)
        policy = self._state.scheduler.policy
        if isinstance(policy, Rehearsed):
            policy.use(choice)


def as_choice(record: ChoiceRecord) -> Choice:
    """Return the choice of a record."""
    return msgspec.convert(record, Choice, from_attributes=True)
