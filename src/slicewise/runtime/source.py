"""A source: another system's state that a process shows but does not own.

Inside the Kubernetes controller, the service is read-only: its journal is derived from the state of
the cluster, and changes are made there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from prometheus_client.registry import Collector

from slicewise.engine.rehearsal import Rehearsal


@dataclass(frozen=True, slots=True)
class Source:
    """The system behind a read-only service, and its health."""

    read_only_message: str
    """The answer to a write: where to make the change instead."""
    problem: Callable[[], str] = lambda: ""
    """Why the shown state may be stale; empty if it is current."""
    leads: Callable[[], bool] = lambda: True
    """Whether this process makes the decisions."""
    collectors: Sequence[Collector] = ()
    """Additional metrics."""
    warnings: Callable[[], Sequence[str]] = tuple
    """What an operator should know although the process serves."""
    choose: Callable[[Rehearsal], Awaitable[str]] | None = None
    """Uses the winner of a rehearsal; returns why not, or nothing. None if nothing is rehearsed."""
