"""A source: somebody else's state, which a process shows and does not own.

Beside a controller the service has nothing of its own to lead: the journal is made from what
another system says, and that system is the place to change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class Source:
    """Where the journal comes from, and how its maker is doing."""

    change_it_there: str
    """A sentence for those who want something changed here."""
    problem: Callable[[], str] = lambda: ""
    """Why what is shown may not be true any more; empty if nothing is wrong."""
    leads: Callable[[], bool] = lambda: True
    """Whether this process is the one that decides."""
    collectors: Sequence[Collector] = ()
    """Metrics beside the service's own."""
