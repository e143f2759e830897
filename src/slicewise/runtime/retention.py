"""Retention: deletes expired answers and journal entries while this process leads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from slicewise.control.ports import Clock, FencedError, Store
from slicewise.core.errors import SlicewiseError

_INTERVAL_SECONDS = 3600.0
_PAUSE_SECONDS = 0.02
"""Pause between two transactions that delete entries, for commits to get in between."""


class Retention:
    """Deletes in small transactions, in the thread that renews the lease."""

    def __init__(
        self,
        store: Store,
        answers_seconds: float,
        journal_seconds: float,
        archive: Path | None,
        clock: Clock,
        steady: Clock,
        warn: Callable[[str], None],
    ) -> None:
        """A ``journal_seconds`` of 0 keeps entries for ever; ``archive`` gets deleted entries."""
        self._store = store
        self._answers = answers_seconds
        self._journal = journal_seconds
        self._archive = archive
        self._clock = clock
        self._steady = steady
        self._warn = warn
        self._last_run = -math.inf

    def run(self, epoch: int, seconds: float) -> None:
        """Delete for at most ``seconds`` if the interval has passed; the next call continues."""
        steady = self._steady()
        if steady - self._last_run < _INTERVAL_SECONDS:
            return
        until = time.monotonic() + seconds
        now = self._clock()
        while self._store.forget_answers(now - self._answers):
            if time.monotonic() >= until:
                return
        try:
            while self._journal and self._store.prune(epoch, now - self._journal, self._archive):
                if time.monotonic() >= until:
                    return
                time.sleep(_PAUSE_SECONDS)
        except FencedError:
            raise
        except SlicewiseError as error:  # the journal is intact, and the next run tries again
            self._warn(f"expired entries stay in the journal: {error}")
        self._last_run = steady
