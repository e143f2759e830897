"""Policies by name. Built-in ones and those of other packages are registered in the same way.

A package adds a policy with an entry point in its ``pyproject.toml``::

    [project.entry-points."slicewise.policies"]
    my-policy = "my_package:MyPolicy"
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.policies.base import Policy

GROUP = "slicewise.policies"

DEFAULT = "rehearsed"
"""The policy that ``default`` stands for. It decides like `least-lost` unless a rehearsal has found
a table that suits the demand better."""


class PolicyLoadError(SlicewiseError):
    """An entry point that does not lead to a usable policy."""


@cache
def _entries() -> dict[str, EntryPoint]:
    """Entry points by policy name; slicewise's own cannot be replaced by another package."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=_own_first):
        found.setdefault(entry.name, entry)
    return found


def _own_first(entry: EntryPoint) -> tuple[bool, str]:
    return not entry.value.startswith("slicewise."), entry.name


def policy_names() -> tuple[str, ...]:
    """The names of all known policies, slicewise's own first."""
    return tuple(_entries())


@cache
def policy_class(name: str) -> type[Policy]:
    """The policy of that name, or the default one; an unknown name is refused."""
    entries = _entries()
    if name == "default":
        name = DEFAULT
    if name not in entries:
        raise UnknownNameError("policy", name, entries, "see 'slicewise policies'")
    where = f"policy {name!r} ({entries[name].value})"
    try:
        cls = entries[name].load()
    except Exception as error:  # whatever a foreign module raises when imported
        raise PolicyLoadError(f"{where} cannot be loaded: {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise PolicyLoadError(f"{where} is not a subclass of slicewise.Policy")
    if getattr(cls, "name", None) != name or not isinstance(getattr(cls, "summary", None), str):
        raise PolicyLoadError(f"{where} must have name = {name!r} and a summary")
    return cls


def policy(name: str) -> Policy:
    """A new policy of that name."""
    return policy_class(name)()


def check_different(policies: Iterable[Policy]) -> None:
    """Refuse a policy that is there twice, be it under its own name and as ``default``."""
    seen: set[str] = set()
    for each in policies:
        if each.name in seen:
            raise SlicewiseError(f"policy {each.name!r} is named twice")
        seen.add(each.name)
