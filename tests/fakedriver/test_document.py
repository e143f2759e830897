"""The example program of docs/fake-driver.md works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.usefixtures("library")
def test_example_prints_the_documented_output(tmp_path: Path) -> None:
    program = Path(__file__).with_name("example.py")
    document = Path(__file__).parents[2] / "docs" / "fake-driver.md"
    printed = subprocess.check_output([sys.executable, program], cwd=tmp_path, text=True)
    assert printed == "4\n3g.71gb at slice 4\n"
    assert all(f"`{line}`" in document.read_text() for line in printed.splitlines())
