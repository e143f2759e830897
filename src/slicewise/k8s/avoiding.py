"""Nodes that are left out for a pod for some time, since it was tried there in vain.

Each time in a row the time doubles. A node whose time is over is tried again, and how long it was
left out is remembered until the pod is bound or gone.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS, MOST_SECONDS = 10.0, 300.0
"""How long a node is left out at first, and at most."""
EVERYWHERE = ""
"""In place of a node: nowhere at all is the pod tried."""

_NEVER = 0.0, 0.0
_OVER = 0.0


class Avoided:
    """By pod: the nodes that are left out, and until when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, dict[str, tuple[float, float]]] = {}
        """By pod and node: until when it is left out, and for how long that is."""

    def add(self, pod: str, node: str) -> None:
        """A pod was tried on a node in vain."""
        nodes = self._until.setdefault(pod, {})
        span = min(2 * nodes[node][1], MOST_SECONDS) if node in nodes else FIRST_SECONDS
        nodes[node] = self._clock() + span, span

    def holds(self, pod: str, node: str) -> bool:
        """Whether a node is left out for a pod at this moment."""
        return self._until.get(pod, {}).get(node, _NEVER)[0] > self._clock()

    def forget(self, pod: str) -> None:
        """A pod is bound or gone."""
        self._until.pop(pod, None)

    def expire(self) -> bool:
        """Whether a node has become worth another try since this was last asked."""
        now = self._clock()
        some = False
        for nodes in self._until.values():
            for node, (until, span) in nodes.items():
                if _OVER < until <= now:
                    nodes[node] = _OVER, span
                    some = True
        return some

    @property
    def next_time(self) -> float | None:
        """When the next node is worth another try."""
        times = [until for nodes in self._until.values() for until, _ in nodes.values()]
        return min((until for until in times if until > _OVER), default=None)
