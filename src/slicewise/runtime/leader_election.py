"""The leader elector: a thread that acquires the lease, renews it, and resigns at the end.

Safety does not depend on the lease. The database checks the epoch of every commit, so two processes
never write at the same time; the lease only decides which process tries.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from slicewise.control.ports import Clock, FencedError, Leader, Store, StoreError
from slicewise.runtime.commit_loop import CommitLoop
from slicewise.runtime.retention import Retention


class LeaderCallbacks(Protocol):
    """What the elector needs from the process; all of it is called in the elector's thread."""

    def start_leading(self, epoch: int) -> CommitLoop:
        """Bring the replica up to date and start the commit loop under this epoch."""

    def stop_leading(self) -> None:
        """Accept no more commands."""

    def finish_commits(self, commit_loop: CommitLoop) -> None:
        """Commit what is queued and end the commit loop; blocks until that is done."""

    def new_leader(self, leader: Leader | None) -> None:
        """Another process leads, or none."""

    def store_status(self, problem: str | None) -> None:
        """The store fails with this problem, or works again."""

    def fail(self, why: str) -> None:
        """The process cannot continue."""


class LeaderElector:
    """Leads whenever the lease is free."""

    def __init__(
        self,
        store: Store,
        callbacks: LeaderCallbacks,
        holder: str,
        address: Callable[[], str],
        lease_seconds: float,
        steady: Clock,
        retention: Retention,
    ) -> None:
        self._store = store
        self._callbacks = callbacks
        self._holder = holder
        self._address = address
        self._lease = lease_seconds
        self._steady = steady
        self._retention = retention
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leader-elector", daemon=True)
        self.first_try = threading.Event()
        """Set after the first attempt to acquire the lease."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the queued commits, resign and end; blocks until that is done."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    self._try_to_lead()
                    self._callbacks.store_status(None)
                except StoreError as error:
                    self._callbacks.store_status(str(error))
                except FencedError:
                    pass  # another process was faster; the next attempt finds out which
                self._stop.wait(min(1.0, self._lease / 3))
        except Exception as error:
            self._callbacks.fail(f"leader election failed: {error!r}")
            raise
        finally:
            self.first_try.set()

    def _try_to_lead(self) -> None:
        epoch = self._store.lead(self._holder, self._address(), self._lease)
        if epoch is None:
            self._callbacks.new_leader(self._store.leader())
            self.first_try.set()
            return
        try:
            commit_loop = self._callbacks.start_leading(epoch)
            self.first_try.set()
            try:
                self._lead(epoch, commit_loop)
            finally:
                self._callbacks.stop_leading()
                self._callbacks.finish_commits(commit_loop)
        finally:
            self._resign(epoch)

    def _lead(self, epoch: int, commit_loop: CommitLoop) -> None:
        """Renew the lease until it is lost or the elector is stopped.

        The first renewal is immediate: it publishes this leader's time to the standbys.
        """
        pause = 0.0
        while not self._stop.wait(pause):
            pause = self._lease / 3
            if commit_loop.fenced:
                return
            if not commit_loop.alive:
                self._callbacks.fail("the commit loop stopped unexpectedly")
                self._stop.set()
                return
            try:
                if not self._store.renew(epoch, self._lease, self._steady()):
                    return
                self._retention.run(epoch, self._lease / 6)
                self._callbacks.store_status(commit_loop.trouble)
            except StoreError as error:
                self._callbacks.store_status(str(error))

    def _resign(self, epoch: int) -> None:
        try:
            self._store.resign(epoch)
        except StoreError as error:
            self._callbacks.store_status(str(error))
