"""The journal of the controller: what it did lately, for those who look.

Kubernetes keeps the state; this only lets the service's reading half (its API, its metrics, the
dashboard) follow. So it keeps an image and the latest rows, and nobody can write to it from there.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from slicewise.control.entries import Row, Seconds, concerns, kind
from slicewise.control.image import Image, image_of
from slicewise.control.ports import FencedError, Kept, Key, Leader, Span, StoreError
from slicewise.control.state import State

KEEP = 20_000
"""Rows that can still be read one by one."""


class Recent:
    """A store that follows a controller; for readers it is led by the controller for ever."""

    warnings = ()

    def __init__(self, state: State, address: Callable[[], str], keep: int = KEEP) -> None:
        """``state`` is the controller's own; only its thread calls `record`."""
        self._state = state
        self._address = address
        self._keep = keep
        self._rows: list[Row] = []
        self._image = image_of(state)
        self._changed = threading.Condition()
        self._closed = False
        self._history = secrets.token_hex(8)
        self._begun = state.seq
        self.trouble = ""
        """Why the controller does not know what is going on, if so."""

    def record(self, row: Row) -> None:
        """A row was applied to the controller's state."""
        with self._changed:
            self._rows.append(row)
            if len(self._rows) >= 2 * self._keep:
                self._image = image_of(self._state)
                del self._rows[: -self._keep]
            self._changed.notify_all()

    # What the service reads

    def rows(self, after: int, limit: int) -> list[Row]:
        """Rows behind ``after``, as far as they are kept."""
        with self._changed:
            first = self._rows[0].seq if self._rows else 0
            begin = max(0, after + 1 - first)
            return self._rows[begin : begin + limit]

    def last_image(self) -> Image:
        """How it was before the first row that is kept, or later."""
        with self._changed:
            return self._image

    def last_seq(self) -> int:
        """The number of the last row."""
        with self._changed:
            return self._rows[-1].seq if self._rows else 0

    def span(self) -> Span:
        """Each process tells a history of its own, as far back as rows are kept."""
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
        """Rows in front of ``before``, the newest first, as far as they are kept."""
        with self._changed:
            rows = list(self._rows)
        found: list[Row] = []
        for row in reversed(rows):
            if before is not None and row.seq >= before:
                continue
            whose, what = concerns(row.entry)
            if (
                tenant in (None, whose)
                and subject in (None, what)
                and (not kinds or kind(row.entry) in kinds)
            ):
                found.append(row)
                if len(found) == limit:
                    break
        return found

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows behind ``after``, or so long."""

        def there() -> bool:
            return bool(self._rows) and self._rows[-1].seq > after

        with self._changed:
            self._changed.wait_for(lambda: self._closed or there(), seconds)
            found = there()
        if self.trouble and not found and not self._closed:
            raise StoreError(self.trouble)
        return found

    def check(self) -> None:
        """Memory always answers."""

    def close(self) -> None:
        """Tell those who wait for rows that there are none."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # What nobody does here: Kubernetes is written to, never this

    def leader(self) -> Leader | None:
        """The controller leads, whoever asks."""
        return Leader(1, "kubernetes", self._address(), float("inf"), 0, 0)

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Nobody becomes the leader of this."""
        return None

    def renew(self, epoch: int, seconds: float, steady: Seconds) -> bool:
        """Nobody leads, so nobody leads on."""
        return False

    def reached(self) -> Seconds:
        """Kubernetes keeps no time for us."""
        return 0

    def resign(self, epoch: int) -> None:
        """Nothing to resign from."""

    def append(
        self, epoch: int, rows: Sequence[Row], answers: Iterable[tuple[Key, Kept, Seconds]]
    ) -> None:
        """Refused."""
        raise FencedError("the state is Kubernetes' own: change it there")

    def answers(self, keys: Sequence[Key]) -> dict[Key, Kept]:
        """None were given."""
        return {}

    def keep_image(self, image: Image) -> None:
        """Images are made by the controller."""

    def forget_answers(self, before: Seconds) -> int:
        """There are none."""
        return 0

    def prune(self, epoch: int, before: Seconds, archive: Path | None) -> int:
        """Old rows go by themselves."""
        return 0
