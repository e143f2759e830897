"""In-memory journal and store, for tests and for measuring the cost of durability."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from slicewise.control.answers import RefusedError
from slicewise.control.ports import Clock, FencedError, IdempotencyKey, Kept, Leader, Span
from slicewise.control.snapshot import Snapshot
from slicewise.journal.entries import Row, Seconds, index_keys


class MemoryJournal:
    """A journal in lists."""

    def __init__(self) -> None:
        self.kept_rows: list[Row] = []
        self.kept_answers: dict[IdempotencyKey, Kept] = {}
        self.snapshots: list[Snapshot] = []
        self.epoch = 1

    def answers(self, keys: Sequence[IdempotencyKey]) -> dict[IdempotencyKey, Kept]:
        """The answers given for these keys."""
        return {key: self.kept_answers[key] for key in keys if key in self.kept_answers}

    def append(
        self,
        epoch: int,
        rows: Sequence[Row],
        answers: Iterable[tuple[IdempotencyKey, Kept, Seconds]],
    ) -> None:
        """Keep rows and answers."""
        if epoch != self.epoch:
            raise FencedError(f"epoch {epoch} is over, it is {self.epoch}")
        self.kept_rows.extend(rows)
        self.kept_answers.update({key: kept for key, kept, _ in answers})

    def rows(self, after: int, limit: int) -> list[Row]:
        """Rows after ``after``."""
        return self.kept_rows[after : after + limit]

    def history(
        self,
        *,
        before: int | None,
        limit: int,
        tenant: str | None = None,
        subject: str | None = None,
        kinds: Sequence[str] = (),
    ) -> list[Row]:
        """Rows before ``before``, newest first."""
        end = len(self.kept_rows) if before is None else min(before - 1, len(self.kept_rows))
        found: list[Row] = []
        for row in reversed(self.kept_rows[: max(end, 0)]):
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

    def last_snapshot(self) -> Snapshot | None:
        """The latest snapshot."""
        return self.snapshots[-1] if self.snapshots else None

    def save_snapshot(self, snapshot: Snapshot) -> None:
        """Keep a snapshot."""
        self.snapshots.append(snapshot)


class MemoryStore(MemoryJournal):
    """A whole store in memory; several services of one process may share it."""

    warnings = ()

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.epoch = 0
        self._clock = clock
        self._leader: Leader | None = None
        self._reached: Seconds = 0
        self._given: dict[IdempotencyKey, Seconds] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._history = secrets.token_hex(8)

    def append(
        self,
        epoch: int,
        rows: Sequence[Row],
        answers: Iterable[tuple[IdempotencyKey, Kept, Seconds]],
    ) -> None:
        """Keep rows and answers, and wake waiting readers."""
        answers = list(answers)
        with self._changed:
            super().append(epoch, rows, answers)
            self._given.update({key: at for key, _, at in answers})
            self._changed.notify_all()

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader, unless there is one. Return the new epoch."""
        with self._changed:
            if self.leader() is not None:
                return None
            self.epoch += 1
            until = self._clock() + seconds
            self._leader = Leader(self.epoch, holder, address, until, seconds, self._reached)
            return self.epoch

    def renew(self, epoch: int, seconds: float, steady: Seconds) -> bool:
        """Renew the lease. Return whether this epoch still leads."""
        with self._changed:
            if self._leader is None or epoch != self.epoch:
                return False
            self._reached = steady
            until = self._clock() + seconds
            self._leader = self._leader._replace(until=until, lease=seconds, steady=steady)
            return True

    def reached(self) -> Seconds:
        """The last steady time a leader recorded."""
        return self._reached

    def resign(self, epoch: int) -> None:
        """End the lease."""
        with self._changed:
            if self._leader is not None and epoch == self.epoch:
                self._leader = self._leader._replace(until=self._clock())

    def leader(self) -> Leader | None:
        """The current leader, if any."""
        leader, now = self._leader, self._clock()
        return leader if leader is not None and now < leader.until <= now + leader.lease else None

    def last_seq(self) -> int:
        """The number of the last row."""
        return len(self.kept_rows)

    def span(self) -> Span:
        """The history, complete: nothing is ever pruned."""
        return Span(self._history, (), 0, len(self.kept_rows))

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows after ``after``, for at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self.kept_rows) > after, seconds)
            return len(self.kept_rows) > after

    def forget_answers(self, before: Seconds) -> int:
        """Drop answers given before ``before``. Return how many."""
        with self._changed:
            old = [key for key, at in self._given.items() if at < before]
            for key in old:
                del self._given[key], self.kept_answers[key]
            return len(old)

    def prune(self, epoch: int, before: Seconds, archive: Path | None) -> int:
        """Prune nothing: the journal ends with the process."""
        return 0

    def backup(self) -> Iterator[bytes]:
        """Refuse: an in-memory store has nothing to back up."""
        raise RefusedError(409, "this service keeps its state in memory only: nothing to back up")

    def close(self) -> None:
        """Release waiting readers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
