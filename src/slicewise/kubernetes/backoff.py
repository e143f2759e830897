"""Backoffs: what is not tried for a while, because an attempt failed.

The time doubles with each failure in a row. `NodeBackoff` is for pods on nodes, `ObjectBackoff` for
objects that the API refuses to change.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_SECONDS, MOST_SECONDS = 10.0, 300.0
"""The first and the longest backoff."""

_EXPIRED = 0.0


class NodeBackoff:
    """The backoffs of all pods from nodes, until the pod is bound or deleted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, dict[str, tuple[float, float]]] = {}
        """By pod and node: the end of the backoff and its length."""

    def add(self, pod: str, node: str) -> None:
        """Start a backoff, twice as long as the last one."""
        nodes = self._until.setdefault(pod, {})
        span = min(2 * nodes[node][1], MOST_SECONDS) if node in nodes else FIRST_SECONDS
        nodes[node] = self._clock() + span, span

    def avoided(self, pod: str) -> frozenset[str]:
        """The nodes on which a pod must not be tried now."""
        nodes = self._until.get(pod)
        if nodes is None:
            return frozenset()
        now = self._clock()
        return frozenset(node for node, (until, _) in nodes.items() if until > now)

    def forget(self, pod: str) -> None:
        """Drop the backoffs of a pod that was bound or deleted."""
        self._until.pop(pod, None)

    def expire(self) -> list[str]:
        """The pods of which a backoff has ended since the last call."""
        now = self._clock()
        expired: dict[str, None] = {}
        for pod, nodes in self._until.items():
            for node, (until, span) in nodes.items():
                if _EXPIRED < until <= now:
                    nodes[node] = _EXPIRED, span
                    expired[pod] = None
        return list(expired)

    @property
    def next_time(self) -> float | None:
        """When the next backoff ends."""
        times = [until for nodes in self._until.values() for until, _ in nodes.values()]
        return min((until for until in times if until > _EXPIRED), default=None)


class ObjectBackoff:
    """The backoffs of objects by uid, until they are forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, tuple[float, float]] = {}
        """By uid: the end of the backoff and its length; the end is past once it was taken."""

    def add(self, uid: str) -> None:
        """Start a backoff, twice as long as the last one."""
        known = self._until.get(uid)
        span = FIRST_SECONDS if known is None else min(2 * known[1], MOST_SECONDS)
        self._until[uid] = self._clock() + span, span

    def holds(self, uid: str) -> bool:
        """Whether an object must not be tried now."""
        return self._until.get(uid, (_EXPIRED, 0.0))[0] > self._clock()

    def forget(self, uid: str) -> None:
        """Drop the backoff of an object that was changed or deleted."""
        self._until.pop(uid, None)

    def take_due(self) -> list[str]:
        """The objects of which the backoff has ended since the last call."""
        now = self._clock()
        due = [uid for uid, (until, _) in self._until.items() if _EXPIRED < until <= now]
        for uid in due:
            self._until[uid] = _EXPIRED, self._until[uid][1]
        return due

    @property
    def next_time(self) -> float | None:
        """When the next backoff ends."""
        return min((until for until, _ in self._until.values() if until > _EXPIRED), default=None)
