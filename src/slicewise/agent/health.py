"""Detects unhealthy GPUs from XID errors and uncorrected memory errors.

A GPU stays unhealthy until the node restarts, even if the agent restarts. After a repair, such as a
reset of the GPU, an operator removes ``problems.json`` and restarts the agent.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from slicewise.agent.record import RecordError, write_file

FATAL_XIDS = {
    48: "an uncorrected memory error",
    64: "a page or row of memory could not be retired",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "a high rate of memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU system processor does not answer",
    120: "an error of the GPU system processor",
    136: "link training failed",
    140: "an uncorrected memory error",
    143: "the GPU could not be initialized",
}
"""XID errors that make a GPU unhealthy. Most others are caused by programs."""


class Health:
    """The problems of the GPUs since the node started."""

    def __init__(self, folder: Path, boot: str) -> None:
        self._path = folder / "problems.json"
        self._boot = boot
        self._uncorrected: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            data = json.loads(self._path.read_text(encoding="utf-8"))
            if data["boot"] == boot:
                self._problems = {str(k): str(v) for k, v in data["problems"].items()}

    def problem(self, gpu: str) -> str:
        """The problems of a GPU; empty if it is healthy."""
        return self._problems.get(gpu, "")

    def xid(self, gpu: str, number: int) -> bool:
        """Record an XID error; return whether it makes the GPU unhealthy."""
        if number not in FATAL_XIDS:
            return False
        self._add(gpu, f"XID {number}: {FATAL_XIDS[number]}")
        return True

    def uncorrected(self, gpu: str, count: int) -> bool:
        """Record the number of uncorrected memory errors; return whether it has grown."""
        before = self._uncorrected.setdefault(gpu, count)
        self._uncorrected[gpu] = count
        if count <= before:
            return False
        self._add(gpu, "uncorrected memory errors (ECC)")
        return True

    def _add(self, gpu: str, problem: str) -> None:
        known = self._problems.get(gpu, "")
        if problem in known.split("; "):
            return
        self._problems[gpu] = f"{known}; {problem}" if known else problem
        # If the disk is full, the problem is still kept in memory.
        with contextlib.suppress(RecordError):
            document = {"boot": self._boot, "problems": self._problems}
            write_file(self._path, json.dumps(document, indent=1) + "\n")
