"""The journal of the controller: its recent entries, for the read API and the dashboard.

Kubernetes stores the state. The journal keeps a snapshot and the latest rows in memory, so that the
read API, the metrics and the dashboard can follow the controller. It is read-only for them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from slicewise.control.answers import RefusedError
from slicewise.control.ports import FencedError, IdempotencyKey, Kept, Leader, Span, StoreError
from slicewise.control.snapshot import Snapshot, snapshot_of
from slicewise.control.state import State
from slicewise.journal.entries import Row, Seconds, index_keys

KEEP = 20_000
"""The number of rows that can be read one by one."""


class ControllerJournal:
    """A read-only store of what the controller records; the controller is always its leader."""

    warnings = ()

    def __init__(self, state: State, address: Callable[[], str], keep: int = KEEP) -> None:
        """``state`` is the controller's own; only its thread calls `record`."""
        self._state = state
        self._address = address
        self._keep = keep
        self._rows: list[Row] = []
        self._snapshot = snapshot_of(state)
        self._changed = threading.Condition()
        self._closed = False
        self._history = secrets.token_hex(8)
        self._begun = state.seq
        self.trouble = ""
        """Why the cache of the controller may be out of date; empty if it is not."""

    def record(self, row: Row) -> None:
        """Add a row that was applied to the state."""
        with self._changed:
            self._rows.append(row)
            if len(self._rows) >= 2 * self._keep:
                self._snapshot = snapshot_of(self._state)
                del self._rows[: -self._keep]
            self._changed.notify_all()

    # Reading

    def rows(self, after: int, limit: int) -> list[Row]:
        """The rows after ``after`` that are still kept."""
        with self._changed:
            first = self._rows[0].seq if self._rows else 0
            begin = max(0, after + 1 - first)
            return self._rows[begin : begin + limit]

    def last_snapshot(self) -> Snapshot:
        """A snapshot not older than the first kept row."""
        with self._changed:
            return self._snapshot

    def last_seq(self) -> int:
        """The number of the last row."""
        with self._changed:
            return self._rows[-1].seq if self._rows else 0

    def span(self) -> Span:
        """The history of this process, from the first kept row."""
        with self._changed:
            if not self._rows:
                return Span(self._history, (), self._begun, self._begun)
            return Span(self._history, (), self._rows[0].seq - 1, self._rows[-1].seq)

    def history(
        self,
        *,
        before: int | None,
        limit: int,
        tenant: str | None = None,
        subject: str | None = None,
        kinds: Sequence[str] = (),
    ) -> list[Row]:
        """The kept rows before ``before``, newest first."""
        with self._changed:
            rows = list(self._rows)
        found: list[Row] = []
        for row in reversed(rows):
            if before is not None and row.seq >= before:
                continue
            kind, of_tenant, about = index_keys(row.entry)
            if (
                tenant in (None, of_tenant)
                and subject in (None, about)
                and (not kinds or kind in kinds)
            ):
                found.append(row)
                if len(found) == limit:
                    break
        return found

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows after ``after``, for at most ``seconds``."""

        def there() -> bool:
            return bool(self._rows) and self._rows[-1].seq > after

        with self._changed:
            self._changed.wait_for(lambda: self._closed or there(), seconds)
            found = there()
        if self.trouble and not found and not self._closed:
            raise StoreError(self.trouble)
        return found

    def check(self) -> None:
        """Do nothing: memory is always reachable."""

    def close(self) -> None:
        """End all waits for rows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Unsupported: changes are made in Kubernetes

    def leader(self) -> Leader | None:
        """The controller."""
        return Leader(1, "kubernetes", self._address(), float("inf"), 0, 0)

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Refuse."""
        return None

    def renew(self, epoch: int, seconds: float, steady: Seconds) -> bool:
        """Refuse."""
        return False

    def reached(self) -> Seconds:
        """Return 0: no steady time is stored."""
        return 0

    def resign(self, epoch: int) -> None:
        """Do nothing."""

    def append(
        self,
        epoch: int,
        rows: Sequence[Row],
        answers: Iterable[tuple[IdempotencyKey, Kept, Seconds]],
    ) -> None:
        """Refuse."""
        raise FencedError("the state is in the Kubernetes API: change it there")

    def answers(self, keys: Sequence[IdempotencyKey]) -> dict[IdempotencyKey, Kept]:
        """Return nothing: no answers are stored."""
        return {}

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Do nothing: `record` makes the snapshots."""

    def forget_answers(self, before: Seconds) -> int:
        """Return 0: no answers are stored."""
        return 0

    def backup(self) -> Iterator[bytes]:
        """Refuse: the state is in the Kubernetes API."""
        raise RefusedError(409, "there is nothing to back up: the state is in the Kubernetes API")

    def prune(self, epoch: int, before: Seconds, archive: Path | None) -> int:
        """Return 0: `record` removes old rows."""
        return 0
