"""The reference in docs/python-api.md lists every public name and method of the clients."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from slicewise import client
from slicewise.client import Client

REFERENCE = (Path(__file__).parents[2] / "docs" / "python-api.md").read_text(encoding="utf-8")


def test_the_reference_lists_exactly_the_public_names() -> None:
    named = set(re.findall(r"`client\.(\w+)`", REFERENCE))
    assert named == set(client.__all__)
    assert client.__all__ == sorted(client.__all__)


def test_the_reference_lists_exactly_the_methods() -> None:
    rows = REFERENCE[REFERENCE.index("| Calls | |") :].split("\n\n")[0].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    calls = [name for name, _ in inspect.getmembers(Client, inspect.isfunction)]
    assert sorted(named) == [name for name in calls if not name.startswith("_")]
