"""What the control plane needs from outside: a journal that keeps, and a clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from slicewise.control.answers import Answer
from slicewise.control.entries import Row, Seconds
from slicewise.control.image import Image
from slicewise.core.errors import SlicewiseError


class StoreError(SlicewiseError):
    """The journal could not be reached or written; what was to be written may or may not be."""


class DamagedError(StoreError):
    """What the journal keeps is not what was written; what can be done about it is said, too."""


class FencedError(SlicewiseError):
    """Somebody else leads by now; nothing was written."""


class Key(NamedTuple):
    """An idempotency key: whose it is, and what they called it."""

    tenant: str
    key: str


class Kept(NamedTuple):
    """An answer that was given for a key."""

    digest: str
    """Of the request, since a key stands for one request only."""
    answer: Answer


DAMAGED = Kept("", Answer(0, b""))
"""Stands for an answer that was given and is not as it was written."""


class Journal(Protocol):
    """Keeps rows, answers and images; all methods may raise StoreError."""

    def answers(self, keys: Sequence[Key]) -> dict[Key, Kept]:
        """The answers given for these keys, where there are any; `DAMAGED` for one that is."""

    def append(
        self, epoch: int, rows: Sequence[Row], answers: Iterable[tuple[Key, Kept, Seconds]]
    ) -> None:
        """Make rows and answers durable together, or raise; FencedError if the epoch is over."""

    def rows(self, after: int, limit: int) -> list[Row]:
        """Rows in order, from the one behind ``after`` on; DamagedError where they do not fit."""

    def history(
        self,
        *,
        before: int | None,
        limit: int,
        tenant: str | None = None,
        subject: str | None = None,
        kinds: Sequence[str] = (),
    ) -> list[Row]:
        """Rows in front of ``before``, the newest first: a tenant's, about a subject, of kinds.

        Tenant and subject are what `entries.concerns` says, kinds what `entries.kind` says.
        """

    def last_image(self) -> Image | None:
        """The latest image kept that is as it was written."""

    def keep_image(self, image: Image) -> None:
        """Keep an image, so that the next start need not read the whole journal."""


class Leader(NamedTuple):
    """Who leads: the one process that may write."""

    epoch: int
    """Grows with every change of leader; what is written under an older one is refused."""
    holder: str
    address: str
    """Where requests that change something should go."""
    until: Seconds
    """When its lease ends unless it is renewed, by the database's clock."""
    lease: Seconds
    """For how long it is renewed at a time."""
    steady: Seconds
    """Its steady time when it last renewed the lease, or its predecessor's if it has not yet."""


class Span(NamedTuple):
    """Which history a journal tells, and from where to where."""

    history: str
    """A name of its own; a journal that was restored goes on under another one."""
    former: tuple[str, ...]
    """The histories that this one goes on from."""
    base: int
    """The last row that is not kept any more; 0 if all are."""
    last: int
    """The last row."""


class Store(Journal, Protocol):
    """A journal with what a service needs around it; safe to call from any thread.

    All methods may raise StoreError. A call that failed leaves the store usable: the next one
    connects again by itself.
    """

    def lead(self, holder: str, address: str, seconds: float) -> int | None:
        """Become the leader and return the new epoch; None while another's lease runs.

        A lease that ends later than its whole length from now was given before the database's clock
        was set back, and is over.
        """

    def renew(self, epoch: int, seconds: float, steady: Seconds) -> bool:
        """Lead for so long from now on, and keep the steady time; False if the epoch is over."""

    def reached(self) -> Seconds:
        """The steady time that the last leader kept, 0 if there was none."""

    def resign(self, epoch: int) -> None:
        """Let the lease end now; nothing happens if the epoch is over."""

    def leader(self) -> Leader | None:
        """Who leads, if somebody's lease runs."""

    def last_seq(self) -> int:
        """The number of the last row, 0 if there is none."""

    def span(self) -> Span:
        """Which history this is, and from where to where it is kept."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was found damaged and can be done without, in words."""

    def wait_for_rows(self, after: int, seconds: float) -> bool:
        """Block until there are rows behind ``after``, or so long; says whether there are."""

    def forget_answers(self, before: Seconds) -> int:
        """Forget some of the answers given before then, and return how many; 0 if none is left."""

    def prune(self, epoch: int, before: Seconds, archive: Path | None) -> int:
        """Take some rows written before then out of the journal, and return how many; 0 at the end.

        Where there is an ``archive``, they are appended to files in that folder first. Rows that a
        start needs stay. FencedError if the epoch is over.
        """

    def check(self) -> None:
        """Raise unless the database answers."""

    def close(self) -> None:
        """Let go of the database; whoever waits for rows is told that there are none."""


class Clock(Protocol):
    """Tells the time."""

    def __call__(self) -> Seconds:
        """Seconds since the epoch."""


def rows_after(journal: Journal, seq: int, page: int = 10_000) -> Iterator[Row]:
    """All rows behind ``seq``, read page by page."""
    while rows := journal.rows(seq, page):
        yield from rows
        seq = rows[-1].seq
