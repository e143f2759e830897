"""The follower: a thread that brings committed rows from the store, while somebody else leads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slicewise.control.entries import Row
from slicewise.control.ports import Store, StoreError

PAGE = 500
"""Rows handed over at a time, so that nobody else waits long while they are applied."""
_LOOK_SECONDS = 1.0
_RETRY_SECONDS = 1.0


class Follower:
    """Hands over rows as they are committed, until it is stopped."""

    def __init__(
        self,
        store: Store,
        after: int,
        hand_over: Callable[[list[Row]], None],
        trouble: Callable[[str | None], None],
        fail: Callable[[str], None],
    ) -> None:
        """``hand_over`` returns when the rows have been taken in; ``fail`` ends the process."""
        self._store = store
        self._after = after
        self._hand_over = hand_over
        self._trouble = trouble
        self._fail = fail
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Follow no longer; what is being handed over may still arrive."""
        self._stop.set()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._store.wait_for_rows(self._after, _LOOK_SECONDS):
                    self._read()
                else:
                    # A store that is closed says at once that there are none.
                    self._stop.wait(0.01)
                self._trouble(None)
            except StoreError as error:
                self._trouble(str(error))
                self._stop.wait(_RETRY_SECONDS)
            except Exception as error:  # whatever it is, what is shown must not grow old in silence
                self._fail(f"the journal is not followed any more: {error!r}")
                return

    def _read(self) -> None:
        while not self._stop.is_set() and (rows := self._store.rows(self._after, PAGE)):
            self._hand_over(rows)
            self._after = rows[-1].seq
