"""`slicewise policies`: which placement policies there are."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slicewise.cli.options import AsJson
from slicewise.cli.output import as_json
from slicewise.policies.base import ScanPolicy
from slicewise.policies.registry import PolicyLoadError, policy_class, policy_names

_NARROWEST = 72
"""In fewer columns the sentences would be cut: rather over the edge of the terminal."""


def policies(json: AsJson = False) -> None:
    """List every placement policy with a line about it."""
    found: list[dict[str, str]] = []
    for name in policy_names():
        try:
            cls = policy_class(name)
        except PolicyLoadError as error:
            found.append({"name": name, "decides": "broken", "summary": str(error)})
            continue
        path = "scan" if issubclass(cls, ScanPolicy) else "constant time"
        found.append({"name": name, "decides": path, "summary": cls.summary})
    if json:
        typer.echo(as_json(found), nl=False)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("Policy", no_wrap=True)
    table.add_column("Decides in", no_wrap=True)
    table.add_column("What it does")
    for row in found:
        table.add_row(*(Text(row[column]) for column in ("name", "decides", "summary")))
    console = Console()
    console.width = max(console.width, _NARROWEST)
    console.print(table)
