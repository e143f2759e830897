"""The fake driver reports what a real one reported, call by call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slicewise.fakedriver import Machine

HERE = Path(__file__).parent

ONE_MACHINES_OWN = {
    *{"uuid", "serial", "temperature", "temperature v"},
    *{"pci.bus", "pci.device", "pci.busId", "pci.busIdLegacy"},
}
"""Fields that differ between GPUs of the same model."""


def reading(machine: Machine, library: Path) -> dict[str, Any]:
    """The output of reading.py on a machine."""
    found: dict[str, Any] = json.loads(
        subprocess.check_output(
            [sys.executable, str(HERE / "reading.py")],
            env=os.environ | machine.environment(library),
        )
    )
    return found


def without_identity(found: dict[str, Any]) -> dict[str, Any]:
    """A reading without the fields that identify a GPU; each of them must exist."""
    for device in found["devices"]:
        for name in ONE_MACHINES_OWN:
            outer, _, inner = name.partition(".")
            del (device[outer] if inner else device)[inner or outer]
    return found


def test_h200_with_mig_off_matches_a_real_one(make: Callable[..., Machine], library: Path) -> None:
    real = json.loads((HERE / "h200_reading.json").read_text())["reading"]
    machine = make("H200-141GB", mig=False, driver=real["driver"])
    assert without_identity(reading(machine, library)) == without_identity(real)
