"""The reference in docs/python-api.md tells of everything that the clients have."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from slicewise import client
from slicewise.client import Client

REFERENCE = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")


def test_every_public_name_is_there_and_no_other() -> None:
    named = set(re.findall(r"`client\.(\w+)`", REFERENCE))
    assert named == set(client.__all__)
    assert client.__all__ == sorted(client.__all__)


def test_every_call_is_there_and_no_other() -> None:
    rows = REFERENCE[REFERENCE.index("| Calls | |") :].split("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    calls = [name for name, _ in inspect.getmembers(Client, inspect.isfunction)]
    assert sorted(named) == [name for name in calls if not name.startswith("_")]
