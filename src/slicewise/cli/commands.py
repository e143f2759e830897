"""The commands by the module that has them; a module is imported when one of its commands is used.

Most commands talk to a service and start in a moment. Those of the laboratory need NumPy and more,
and only those who run them should wait for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

_COMMANDS = {
    "geometry_command": {
        "geometry": "List every GPU model, or draw the slice map of one with every profile's legal "
        "starts.",
    },
    "score": {
        "score": "Compute the fragmentation score F of a GPU, under both readings, profile by "
        "profile.",
    },
    "policies": {
        "policies": "List every placement policy with a line about it.",
    },
    "simulate": {
        "simulate": "Compare policies on the same arrivals, with 95% intervals over the runs.",
    },
    "sweep": {
        "sweep": "Run every combination of an experiment file; what is finished already is not run "
        "again.",
    },
    "plan": {
        "plan": "Find the smallest cluster for a demand under each policy, and what choosing one "
        "saves.",
    },
    "replay": {
        "replay": "Compare policies on the requests of a recorded trace.",
    },
    "reproduce": {
        "reproduce": "Run the published experiment and hold our figures against the paper's.",
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
        "agent": "Make the MIG instances of this node as the scheduler decides.",
    },
    "k8s": {
        "k8s": "Give the pods of a Kubernetes cluster their slices, until interrupted.",
    },
    "store": {
        "backup": "Write everything the service keeps to one file; the service may go on "
        "meanwhile.",
        "restore": "Bring a backup into an empty folder or database, all of it or nothing.",
        "verify": "Work out from the journal whether everything is as it must be; exit 1 if it is "
        "not.",
    },
    "demo": {
        "demo": "Start a service to look at: five nodes that do not exist, three tenants, live "
        "traffic.",
    },
    "allocations": {
        "submit": "Ask a service for an instance; exits with 1 when it is rejected.",
        "release": "End allocations of a service, or take them out of its queue.",
        "ls": "List the allocations of a service: those that live, unless a state is named.",
        "show": "Show one allocation of a service, living or ended.",
        "explain": "Say where a request would go now, what that costs, and why other places lose.",
        "queue": "Show who waits for room in a service, in order.",
    },
    "events": {
        "events": "Show what happens in a service as it happens; a broken connection is taken up "
        "again.",
    },
    "top": {
        "top": "Watch a service: its GPUs slice by slice, what is left, who waits, how fast it "
        "goes.",
    },
    "nodes": {
        "nodes": "List the nodes of a service; or look at one, add, cordon, drain and remove them.",
    },
    "estate": {
        "tenants": "List the tenants of a service, what they hold of what they may; or change "
        "them.",
        "tokens": "List the tokens of a service, without their secrets; or issue, rotate and "
        "revoke them.",
    },
    "clock": {
        "clock": "Show service time, by which leases end, and the wall clock; or accept a step.",
    },
    "audit": {
        "audit": "The journal for those who audit it.",
    },
}
"""Modules of this package, their commands and what the list of commands says of each: the first
sentence of its help, which a test compares."""


class LazyCommand(TyperCommand):
    """A name and a summary; the command itself is loaded when arguments are to be parsed."""

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
        """The context of the command itself: it is what parses, runs, helps and completes."""
        return self.loaded.make_context(info_name, args, parent, **extra)


def commands() -> Iterator[LazyCommand]:
    """All commands, in the order of the list."""
    for module, summaries in _COMMANDS.items():
        for name, summary in summaries.items():
            yield LazyCommand(name, module, summary)
