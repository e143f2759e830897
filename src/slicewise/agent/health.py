"""Which GPUs are sick: XID errors that mean it, and memory errors that could not be corrected.

What was found stays with a GPU until the node is restarted, also when the agent is. An operator who
knows better (after a reset of the GPU, say) removes ``problems.json`` and restarts the agent.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from slicewise.agent.record import RecordError, write_file

SICK = {
    48: "a memory error that could not be corrected",
    64: "a page or row of memory that could not be retired",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "a high rate of memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
    136: "a link could not be trained",
    140: "a memory error that could not be corrected",
    143: "the GPU could not be initialised",
}
"""The XID errors after which a GPU is not to be trusted; others are mostly a program's own."""


class Health:
    """The problems of the GPUs, kept for as long as the node is up."""

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
        """What is wrong with a GPU; nothing where nothing is."""
        return self._problems.get(gpu, "")

    def xid(self, gpu: str, number: int) -> bool:
        """Take note of an XID error; says whether the GPU is sick with it."""
        if number not in SICK:
            return False
        self._note(gpu, f"XID {number}: {SICK[number]}")
        return True

    def uncorrected(self, gpu: str, count: int) -> bool:
        """Take note of the number of uncorrected errors; says whether it has grown."""
        before = self._uncorrected.setdefault(gpu, count)
        self._uncorrected[gpu] = count
        if count <= before:
            return False
        self._note(gpu, "memory errors that could not be corrected (ECC)")
        return True

    def _note(self, gpu: str, sentence: str) -> None:
        known = self._problems.get(gpu, "")
        if sentence in known.split("; "):
            return
        self._problems[gpu] = f"{known}; {sentence}" if known else sentence
        # A full disk does not make a GPU well: it is still known here.
        with contextlib.suppress(RecordError):
            document = {"boot": self._boot, "problems": self._problems}
            write_file(self._path, json.dumps(document, indent=1) + "\n")
