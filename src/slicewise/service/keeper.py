"""The keeper: a thread that tries to lead, keeps the lease while it does, and steps down in order.

That two processes never write at the same time does not hang on this: every commit is checked
against the epoch by the database. The lease only says who should try.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from slicewise.control.ports import Clock, FencedError, Leader, Store, StoreError
from slicewise.control.writer import Writer
from slicewise.core.errors import SlicewiseError

_SWEEP_SECONDS = 3600.0
"""How often old answers are forgotten, and old entries taken out of the journal."""
_BETWEEN_SECONDS = 0.02
"""Between two transactions of it, so that commits get in between."""


class Seat(Protocol):
    """What the keeper needs from the process: all of it may be called from the keeper's thread."""

    def take_office(self, epoch: int) -> Writer:
        """Bring the replica up to date and begin to write under this epoch."""

    def leave_office(self) -> None:
        """Take no more writes."""

    def leader_is(self, leader: Leader | None) -> None:
        """Somebody else leads, or nobody."""

    def trouble(self, what: str | None) -> None:
        """The store cannot be reached, or can be again."""

    def warn(self, what: str) -> None:
        """Something should be looked at, and keeps the process from nothing."""

    def fail(self, why: str) -> None:
        """The process cannot go on."""


class Keeper:
    """Leads when it can."""

    def __init__(
        self,
        store: Store,
        seat: Seat,
        holder: str,
        address: Callable[[], str],
        lease_seconds: float,
        answers_seconds: float,
        journal_seconds: float,
        archive: Path | None,
        clock: Clock,
        steady: Clock,
    ) -> None:
        self._store = store
        self._seat = seat
        self._holder = holder
        self._address = address
        self._lease = lease_seconds
        self._answers = answers_seconds
        self._journal = journal_seconds
        """How long entries are kept; 0 is for ever."""
        self._archive = archive
        self._clock = clock
        self._steady = steady
        self._swept = -math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self.first_try = threading.Event()
        """Set when it is known for the first time who leads."""

    def start(self) -> None:
        """Begin to try."""
        self._thread.start()

    def stop(self) -> None:
        """Finish what was handed in, step down and end; blocks until that is done."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._try_to_lead()
                    self._seat.trouble(None)
                except StoreError as error:
                    self._seat.trouble(str(error))
                except FencedError:
                    pass  # somebody was faster: it will be seen who
                self._stop.wait(min(1.0, self._lease / 3))
        except Exception as error:  # whatever it is, it must not end in silence
            self._seat.fail(f"the keeper of the lease failed: {error!r}")
            raise
        finally:
            self.first_try.set()

    def _try_to_lead(self) -> None:
        epoch = self._store.lead(self._holder, self._address(), self._lease)
        if epoch is None:
            self._seat.leader_is(self._store.leader())
            self.first_try.set()
            return
        try:
            writer = self._seat.take_office(epoch)
            self.first_try.set()
            try:
                self._lead(epoch, writer)
            finally:
                self._seat.leave_office()
                writer.stop()
        finally:
            self._resign(epoch)

    def _lead(self, epoch: int, writer: Writer) -> None:
        """Renew the lease until it is lost, or time to stop.

        First at once: others are to know this leader's time, not its predecessor's.
        """
        pause = 0.0
        while not self._stop.wait(pause):
            pause = self._lease / 3
            if writer.fenced:
                return
            if not writer.alive:
                self._seat.fail("the writer stopped unexpectedly")
                self._stop.set()
                return
            try:
                if not self._store.renew(epoch, self._lease, self._steady()):
                    return
                self._sweep(epoch)
                self._seat.trouble(writer.trouble)
            except StoreError as error:
                self._seat.trouble(str(error))

    def _sweep(self, epoch: int) -> None:
        """Forget for a while what is old; the lease is renewed before it goes on."""
        now = self._steady()
        if now - self._swept < _SWEEP_SECONDS:
            return
        until = time.monotonic() + self._lease / 6
        clock = self._clock()
        while self._store.forget_answers(clock - self._answers):
            if time.monotonic() >= until:
                return
        try:
            while self._journal and self._store.prune(epoch, clock - self._journal, self._archive):
                if time.monotonic() >= until:
                    return
                self._stop.wait(_BETWEEN_SECONDS)
        except FencedError:
            raise
        except SlicewiseError as error:  # it can wait, and the journal is whole
            self._seat.warn(f"old entries stay in the journal: {error}")
        self._swept = now

    def _resign(self, epoch: int) -> None:
        try:
            self._store.resign(epoch)
        except StoreError as error:
            self._seat.trouble(str(error))
