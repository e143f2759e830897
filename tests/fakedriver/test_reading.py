"""The fake driver says what a real one said, call by call."""

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
"""What a GPU says of itself that another GPU of its kind would not say."""


def reading(machine: Machine, library: Path) -> dict[str, Any]:
    """What reading.py reads from a machine."""
    told: dict[str, Any] = json.loads(
        subprocess.check_output(
            [sys.executable, str(HERE / "reading.py")],
            env=os.environ | machine.environment(library),
        )
    )
    return told


def without_its_own(told: dict[str, Any]) -> dict[str, Any]:
    """A reading without what tells one GPU from another; each such field must be there."""
    for device in told["devices"]:
        for name in ONE_MACHINES_OWN:
            outer, _, inner = name.partition(".")
            del (device[outer] if inner else device)[inner or outer]
    return told


def test_an_h200_with_mig_off_answers_as_a_real_one(
    make: Callable[..., Machine], library: Path
) -> None:
    real = json.loads((HERE / "h200_reading.json").read_text())["reading"]
    machine = make("H200-141GB", mig=False, driver=real["driver"])
    assert without_its_own(reading(machine, library)) == without_its_own(real)
