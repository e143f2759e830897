"""The table of commands. A module is imported when one of its commands is used.

Commands that talk to a service start fast; those of the lab import NumPy and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

_COMMANDS = {
    "geometry": {
        "geometry": "List every GPU model, or draw the slice map of one with every profile's legal "
        "starts.",
    },
    "score": {
        "score": "Compute the fragmentation score F of a GPU, under every reading, profile by "
        "profile.",
    },
    "policies": {
        "policies": "List every placement policy with a line about it.",
    },
    "simulate": {
        "simulate": "Compare policies on the same arrivals, with 95% intervals over the runs.",
    },
    "sweep": {
        "sweep": "Run every combination of an experiment file; finished runs are not repeated.",
    },
    "plan": {
        "plan": "Find the smallest cluster for a demand under each policy, and the GPUs saved.",
    },
    "replay": {
        "replay": "Compare policies on the requests of a recorded trace.",
    },
    "reproduce": {
        "reproduce": "Run the published experiment and compare our figures with the paper's.",
    },
    "defrag": {
        "defrag": "Plan moves of instances to other GPUs or slices; nothing is moved.",
    },
    "bench": {
        "bench": "Time decisions at 85% sustained load: engine, compiled, and the paper's scan "
        "beside them.",
    },
    "serve": {
        "serve": "Serve the HTTP API until interrupted; settings also come from a file and "
        "SLICEWISE_*.",
    },
    "agent": {
        "agent": "Run the node agent: create and destroy MIG instances as the scheduler decides.",
    },
    "k8s": {
        "k8s": "Run the Kubernetes controller: allocate slices to pods until interrupted.",
    },
    "store": {
        "backup": "Write the contents of a store to one file.",
        "restore": "Restore a backup into an empty folder or database, completely or not at all.",
        "verify": "Check the stored state against the journal; exit with 1 if they differ.",
    },
    "demo": {
        "demo": "Start a demo service: five simulated nodes, three tenants, live traffic.",
    },
    "login": {
        "login": "Sign in with the identity provider of a service; later commands use the token.",
        "logout": "Forget the token that `slicewise login` keeps for a service.",
    },
    "allocations": {
        "submit": "Request an instance; exit with 1 if the request is rejected.",
        "release": "Release allocations, or remove them from the queue.",
        "extend": "Extend the lease of an allocation; it never gets shorter.",
        "ls": "List allocations: the live ones, unless --state is given.",
        "show": "Show one allocation, live or ended.",
        "explain": "Explain where a request would be placed, at what cost, and why not elsewhere.",
    },
    "queue": {
        "queue": "List the queue: one line for each tenant and kind of request, in fair order.",
    },
    "events": {
        "events": "Stream events as they happen; reconnect when the connection breaks.",
    },
    "rehearsal": {
        "rehearsal": "Show which table places requests, why, and what the last rehearsal found.",
    },
    "top": {
        "top": "Watch a service: GPUs slice by slice, free capacity, queue and rates.",
    },
    "nodes": {
        "nodes": "List nodes; or show, add, cordon, drain and remove them.",
    },
    "tenants": {
        "tenants": "List tenants with their usage and quotas; or add, change and remove them.",
        "tokens": "List tokens, without their secrets; or issue, rotate and revoke them.",
    },
    "clock": {
        "clock": "Show service time, which leases follow, and the wall clock; or accept a step.",
    },
    "audit": {
        "audit": "Export the journal for an audit.",
    },
}
"""By module: its commands and summaries, which a test compares with their help texts."""


class LazyCommand(TyperCommand):
    """A name and a summary; the command itself is loaded when its arguments are parsed."""

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name, help=summary, rich_markup_mode=None)
        self._where = f"{__package__}.{module}", name

    @cached_property
    def loaded(self) -> Any:
        """The command or group itself."""
        module, name = self._where
        found = getattr(import_module(module), name)
        if isinstance(found, typer.Typer):
            return typer.main.get_command(found)
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(found)
        return typer.main.get_command(single)

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Return the context of the loaded command, which parses, runs, helps and completes."""
        return self.loaded.make_context(info_name, args, parent, **extra)


def commands() -> Iterator[LazyCommand]:
    """All commands, in the order of the list."""
    for module, summaries in _COMMANDS.items():
        for name, summary in summaries.items():
            yield LazyCommand(name, module, summary)
