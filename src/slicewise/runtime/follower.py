"""The follower: a thread that reads committed rows from the store while another process leads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from slicewise.control.ports import Store, StoreError
from slicewise.journal.entries import Row

PAGE = 500
"""Rows applied at a time: the event loop is blocked while they are."""
_WAIT_SECONDS = 1.0
_RETRY_SECONDS = 1.0


class Follower:
    """Passes on rows as they are committed, until it is stopped."""

    def __init__(
        self,
        store: Store,
        after: int,
        apply: Callable[[list[Row]], None],
        store_status: Callable[[str | None], None],
        fail: Callable[[str], None],
    ) -> None:
        """``apply`` returns when the rows have been applied; ``fail`` ends the process."""
        self._store = store
        self._after = after
        self._apply = apply
        self._store_status = store_status
        self._fail = fail
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; the rows it has already read may still be applied."""
        self._stop.set()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread to end."""
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if self._store.wait_for_rows(self._after, _WAIT_SECONDS):
                    self._read()
                else:
                    self._stop.wait(0.01)  # a closed store returns at once
                self._store_status(None)
            except StoreError as error:
                self._store_status(str(error))
                self._stop.wait(_RETRY_SECONDS)
            except Exception as error:  # otherwise the process would serve stale state unnoticed
                self._fail(f"following the journal failed: {error!r}")
                return

    def _read(self) -> None:
        while not self._stop.is_set() and (rows := self._store.rows(self._after, PAGE)):
            self._apply(rows)
            self._after = rows[-1].seq
