"""Shell completion: names from the catalog and from the service.

Only the shell calls these functions, so they import lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from slicewise.cli.connection import DEFAULT_SERVER, connect
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.client import Client

_MOST = 100
"""Maximum number of names to offer."""


def models(incomplete: str) -> list[str]:
    """The GPU models that can be scheduled."""
    from slicewise.catalog import Catalog

    names = (entry.model for entry in Catalog.builtin().entries() if entry.geometry is not None)
    return _matching(incomplete, names)


def profiles(incomplete: str) -> list[str]:
    """The profiles of all models."""
    from slicewise.catalog import Catalog

    geometries = (entry.geometry for entry in Catalog.builtin().entries())
    return _matching(
        incomplete,
        dict.fromkeys(p.name for geometry in geometries if geometry for p in geometry.profiles),
    )


def policies(incomplete: str) -> list[str]:
    """The policies."""
    from slicewise.policies.registry import policy_names

    return _matching(incomplete, policy_names())


def allocations(context: typer.Context, incomplete: str) -> list[str]:
    """The live allocations."""
    return _query(context, incomplete, lambda client: (one.id for one in client.allocations()))


def nodes(context: typer.Context, incomplete: str) -> list[str]:
    """The nodes."""
    return _query(context, incomplete, lambda client: (node.name for node in client.nodes()))


def tenants(context: typer.Context, incomplete: str) -> list[str]:
    """The tenants."""
    return _query(context, incomplete, lambda client: (one.name for one in client.tenants()))


def tokens(context: typer.Context, incomplete: str) -> list[str]:
    """The tokens."""
    return _query(context, incomplete, lambda client: (one.id for one in client.tokens()))


def _matching(incomplete: str, names: Iterable[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        if name.startswith(incomplete):
            found.append(name)
            if len(found) == _MOST:
                break
    return found


def _query(
    context: typer.Context, incomplete: str, names: Callable[[Client], Iterable[str]]
) -> list[str]:
    """Query the service; return nothing on error, because completion cannot show one."""
    file = context.params.get("token_file")
    try:
        with connect(
            context.params.get("server") or DEFAULT_SERVER,
            None if file is None else Path(file),
            patience=0,
        ) as client:
            return _matching(incomplete, names(client))
    except SlicewiseError:
        return []
