"""Quarantine: claims that the API refuses to change, for instance by an admission policy.

Such a claim is not allocated, because a write of a former leader might still arrive for it, or
because the allocation itself is refused. It must not stop the others: everything else goes on. It
is tried again when it has changed, or after a time that doubles with each refusal.
"""

from __future__ import annotations

from collections.abc import Callable

from slicewise.kubernetes.backoff import ObjectBackoff
from slicewise.kubernetes.claim_states import ClaimRecord, ClaimRecords, ClaimState

_NAMED = 3
"""The number of claims that a summary names."""
_WORDS = 300
"""The most characters of the API's words that are repeated: it may repeat the claim itself."""


class Quarantine:
    """The claims that the API refused to change."""

    def __init__(self, records: ClaimRecords, clock: Callable[[], float]) -> None:
        self._records = records
        self._backoff = ObjectBackoff(clock)
        self._why: dict[str, str] = {}
        """By uid: what the API said the last time. Claims that are tried again are kept."""

    def add(self, record: ClaimRecord, why: str) -> None:
        """Quarantine a claim that has no devices."""
        if record.state is not ClaimState.QUARANTINED:
            self._records.move(record, ClaimState.QUARANTINED)
        uid = record.claim.metadata.uid
        self._why[uid] = why if len(why) <= _WORDS else f"{why[:_WORDS]}..."
        self._backoff.add(uid)

    def forget(self, uid: str) -> None:
        """Drop what is known of a claim that was allocated or deleted."""
        self._why.pop(uid, None)
        self._backoff.forget(uid)

    def clear(self) -> None:
        """Empty the quarantine: another replica leads now, and fences by itself."""
        for record in self.records():
            self._records.move(record, ClaimState.PENDING)
        for uid in list(self._why):
            self.forget(uid)

    def why(self, uid: str) -> str:
        """Why a claim is in quarantine; empty if it is not."""
        record = self._records.get(uid)
        inside = record is not None and record.state is ClaimState.QUARANTINED
        return self._why[uid] if inside else ""

    def take_due(self) -> list[ClaimRecord]:
        """The claims to try again; each is returned once, until it is added again."""
        for uid in [uid for uid in self._why if self._records.get(uid) is None]:
            self.forget(uid)
        due = (self._records[uid] for uid in self._backoff.take_due())
        return [record for record in due if record.state is ClaimState.QUARANTINED]

    @property
    def next_time(self) -> float | None:
        """When the next claim is tried again."""
        return self._backoff.next_time

    def records(self) -> list[ClaimRecord]:
        """The records of the claims in quarantine."""
        there = (self._records.get(uid) for uid in self._why)
        return [one for one in there if one and one.state is ClaimState.QUARANTINED]

    def summary(self) -> str:
        """The claims in quarantine, for an operator; empty if there are none."""
        found = self.records()
        if not found:
            return ""
        named = "; ".join(
            f"{one.claim.metadata.key}: {self._why[one.claim.metadata.uid]}"
            for one in found[:_NAMED]
        )
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        claims = "1 claim is" if len(found) == 1 else f"{len(found)} claims are"
        return f"{claims} not allocated, because the API refuses to change them: {named}{more}"
