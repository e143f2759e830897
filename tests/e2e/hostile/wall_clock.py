"""A server with a wall clock that a test can set.

Debian's faketime intercepts the C library. It changes the wall clock, for SQLite too, but not the
monotonic clock.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from scripts.test_services import MissingServiceError, require_program
from tests.e2e.server import Server

DAY = 86_400.0
_SHARED = Path("/dev/shm")


@cache
def _library() -> str:
    """Return the path of faketime's library; in CI it must exist."""
    try:
        program = require_program("faketime")
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    # faketime sets it in the environment of its child; -m selects the library for threads.
    asked = [str(program), "-m", "-f", "+0", "printenv", "LD_PRELOAD"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True)
    return str(told.stdout).strip()


class ClockedServer(Server):
    """A server with its own wall clock."""

    def __init__(
        self, folder: Path, *, database: str | None = None, settings: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, database=database, settings=settings)
        self._clock = folder / "wall-clock"
        self._pids: list[int] = []
        self.set_clock(0)
        told = {
            "LD_PRELOAD": _library(),
            "FAKETIME_TIMESTAMP_FILE": str(self._clock),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        self.prefix = ["env", *(f"{name}={value}" for name, value in told.items())]

    def set_clock(self, ahead: float) -> None:
        """Set the wall clock this many seconds ahead of the real one."""
        draft = self._clock.with_suffix(".new")
        draft.write_text(f"{ahead:+.0f}\n")
        draft.replace(self._clock)

    def launch(self) -> None:
        """Start the process without waiting for it."""
        super().launch()
        self._pids.append(self.pid)

    def destroy(self) -> None:
        """Kill the process, and remove the files that faketime left."""
        self.kill()
        for pid in self._pids:
            for name in (f"faketime_shm_{pid}", f"sem.faketime_sem_{pid}"):
                (_SHARED / name).unlink(missing_ok=True)
