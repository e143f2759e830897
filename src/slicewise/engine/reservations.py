"""Reservations: windows kept for requests that waited long, so that others cannot starve them.

A reservation belongs to a line: the waiting requests of one tenant for the same instances. The
first window of a line to open serves the first request of the line, the second the next. A window
binds every other request, except those whose lease ends before it opens. A GPU has at most one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import NamedTuple

from slicewise.core.cluster import Cluster, Instance
from slicewise.core.geometry import Geometry
from slicewise.core.request import Request
from slicewise.core.states import ILLEGAL

LOOK_AT = 1024
"""The number of GPUs that are searched for the best window; those with more free slices first."""

Ends = Callable[[Instance], float | None]
"""When an instance ends; None if that is unknown."""

Suits = Callable[[Request, int, Sequence[Instance]], bool]
"""Whether a request may use a window on a GPU once these instances have ended."""


class LineKey(NamedTuple):
    """A line: the waiting requests of one tenant for the same instances."""

    tenant: str
    request: Request
    instances: int


class Window(NamedTuple):
    """A placement that is kept for a line."""

    gpu: int
    placement: int
    opens: float | None
    """When the last instance in it ends; None if that is unknown."""
    claimed: bool = False
    """Whether instances in it end for the line, which claimed its guarantee."""


class Reservations:
    """The reserved windows of a cluster, by line."""

    def __init__(self, cluster: Cluster, suits: Suits | None = None) -> None:
        self._cluster = cluster
        self._suits = suits
        self._pools: dict[LineKey, tuple[Window, ...]] = {}
        self._line_of: dict[int, LineKey] = {}

    def set(self, line: LineKey, windows: Sequence[Window]) -> None:
        """Replace the windows of a line."""
        for window in self._pools.pop(line, ()):
            self._cluster.unreserve(window.gpu)
            del self._line_of[window.gpu]
        for window in windows:
            self._cluster.reserve(window.gpu, window.placement)
            self._line_of[window.gpu] = line
        if windows:
            self._pools[line] = tuple(sorted(windows, key=_opening))

    def of(self, line: LineKey) -> tuple[Window, ...]:
        """The windows of a line, the first to open first."""
        return self._pools.get(line, ())

    def on(self, gpu: int) -> tuple[LineKey, Window] | None:
        """The reservation on a GPU and its line."""
        line = self._line_of.get(gpu)
        if line is None:
            return None
        return line, next(window for window in self._pools[line] if window.gpu == gpu)

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[tuple[LineKey, tuple[Window, ...]]]:
        return iter(list(self._pools.items()))

    def closing_after(self, end: float) -> list[Window]:
        """The windows that open only after this time, or at it."""
        return [
            window
            for pool in self._pools.values()
            for window in pool
            if window.opens is not None and window.opens >= end
        ]

    @contextmanager
    def lifted(self, windows: Iterable[Window]) -> Iterator[None]:
        """Let requests see these windows as if they were not reserved."""
        for window in windows:
            self._cluster.unreserve(window.gpu)
        try:
            yield
        finally:
            for window in windows:
                self._cluster.reserve(window.gpu, window.placement)

    def after_serving(self, line: LineKey, placed: Iterable[Instance]) -> tuple[Window, ...]:
        """The windows left for a line whose first holder was placed, in a window of it or not.

        Whichever window was used, no other request of the line is served later than promised: the
        second now has the first of the others, which opens no later than the second did.
        """
        masks: Counter[int] = Counter()
        for one in placed:
            masks[one.gpu] |= (1 << one.size) - 1 << one.start
        pool = self.of(line)
        left = [w for w in pool if not masks[w.gpu] & self._mask(w)]
        return tuple(left[: len(pool) - line.instances])

    def without_holder(self, line: LineKey) -> tuple[Window, ...]:
        """The windows left for a line when one of its holders gives up."""
        pool = self.of(line)
        return pool[: max(0, len(pool) - line.instances)]

    def usable(self, line: LineKey) -> tuple[Window, ...]:
        """The windows of a line on GPUs that still take instances, for whole requests."""
        suits = self._suits
        pool = [
            window
            for window in self.of(line)
            if self._cluster.takes_instances(window.gpu)
            and (suits is None or suits(line.request, window.gpu, self.blockers(window)))
        ]
        return tuple(pool[: len(pool) - len(pool) % line.instances])

    def drop(self, gpus: Container[int]) -> None:
        """End the reservations on GPUs that leave the cluster."""
        for line, pool in self:
            left = [window for window in pool if window.gpu not in gpus]
            if len(left) < len(pool):
                self.set(line, left[: len(left) - len(left) % line.instances])

    def rename(self, holders: Mapping[LineKey, Sequence[LineKey]]) -> None:
        """Give the windows to other lines, after the requests of their holders were renamed.

        ``holders`` has the new lines of the holders, by line, the first holder first. Lines may
        be split, and joined.
        """
        pools, self._pools = self._pools, {}
        for line, pool in pools.items():
            for position, new in enumerate(holders[line]):
                begin = position * line.instances
                own = pool[begin : begin + line.instances]
                joined = (*self._pools.get(new, ()), *own)
                self._pools[new] = tuple(sorted(joined, key=_opening))
                for window in own:
                    self._line_of[window.gpu] = new

    # Searching

    def find(
        self, request: Request, count: int, most: Mapping[Geometry, int], ends: Ends, now: float
    ) -> tuple[Window, ...] | None:
        """The best windows for the instances of a request, on as many GPUs; None if too few.

        ``most`` limits the windows by GPU model.

        With known ends: those that open first. Otherwise those with the fewest instances in the
        way, on GPUs with a free slice in the window if there are any.
        """
        if sum(most.values()) < count:
            return None
        found: list[tuple[tuple[object, ...], Window]] = []
        for gpu in self._candidates(most):
            best = self.best_on(gpu, request, ends, now)
            if best is not None:
                found.append(best)
        found.sort(key=lambda one: one[0])
        left = dict(most)
        windows: list[Window] = []
        for _, window in found:
            geometry = self._cluster.state(window.gpu).geometry
            if left[geometry] and len(windows) < count:
                left[geometry] -= 1
                windows.append(window)
        return tuple(windows) if len(windows) == count else None

    def best_on(
        self, gpu: int, request: Request, ends: Ends, now: float
    ) -> tuple[tuple[object, ...], Window] | None:
        """The best window on a GPU, and how good it is: lower is better."""
        cluster = self._cluster
        state = cluster.state(gpu)
        wastes = {profile: waste for waste, profile in request.candidates(state.geometry)}
        if not wastes:
            return None
        residents = [
            ((1 << one.size) - 1 << one.start, ends(one), one) for one in cluster.instances_on(gpu)
        ]
        best: tuple[tuple[object, ...], Window] | None = None
        for placement in state.geometry.placements:
            waste = wastes.get(placement.profile)
            if waste is None or cluster.once_cleared(gpu, placement.number) == ILLEGAL:
                continue
            blockers = [end for mask, end, _ in residents if mask & placement.window]
            known = [end for end in blockers if end is not None]
            opens = max(known, default=now) if len(known) == len(blockers) else None
            full = placement.window & ~state.mask == 0
            rank = (0, opens, 0) if opens is not None else (1, full, len(blockers))
            key = (*rank, waste, gpu, placement.start)
            if best is not None and best[0] <= key:
                continue
            in_the_way = [one for mask, _, one in residents if mask & placement.window]
            if self._suits is None or self._suits(request, gpu, in_the_way):
                best = key, Window(gpu, placement.number, opens)
        return best

    def earlier(
        self, gpu: int, ends: Ends, now: float
    ) -> tuple[LineKey, tuple[Window, ...]] | None:
        """The windows of a line that gains by a change on this GPU: one of them opens earlier."""
        held = self.on(gpu)
        if held is not None:
            line, window = held
            opens = self._opens(window, ends, now)
            if opens is None or (window.opens is not None and opens >= window.opens):
                return None
            others = [other for other in self.of(line) if other.gpu != gpu]
            return line, tuple(sorted([*others, window._replace(opens=opens)], key=_opening))
        if not self._cluster.takes_instances(gpu):
            return None
        geometry = self._cluster.state(gpu).geometry
        for line, pool in self:
            last = pool[-1]
            # On another model, the window might exceed the share that may be reserved there.
            if last.opens is None or self._cluster.state(last.gpu).geometry != geometry:
                continue
            best = self.best_on(gpu, line.request, ends, now)
            if best is not None and best[1].opens is not None and best[1].opens < last.opens:
                return line, tuple(sorted([*pool[:-1], best[1]], key=_opening))
        return None

    def blockers(self, window: Window) -> list[Instance]:
        """The instances in a window."""
        mask = self._mask(window)
        return [
            one
            for one in self._cluster.instances_on(window.gpu)
            if (1 << one.size) - 1 << one.start & mask
        ]

    def _opens(self, window: Window, ends: Ends, now: float) -> float | None:
        known = [ends(one) for one in self.blockers(window)]
        return (
            None if None in known else max((end for end in known if end is not None), default=now)
        )

    def _mask(self, window: Window) -> int:
        return self._cluster.state(window.gpu).geometry.placements[window.placement].window

    def _candidates(self, models: Container[Geometry]) -> Iterator[int]:
        """The GPUs of these models without a reservation, those with most free slices first."""
        cluster = self._cluster
        states = [
            number
            for number, state in enumerate(cluster.states)
            if len(cluster.members[number]) and state.geometry in models
        ]
        states.sort(key=lambda number: (-cluster.states[number].free_slices, number))
        gpus = (gpu for number in states for gpu in cluster.members[number])
        return islice((gpu for gpu in gpus if gpu not in self._line_of), LOOK_AT)


def _opening(window: Window) -> tuple[bool, float]:
    """The order in which windows open; those with an unknown time last, as they were granted."""
    return window.opens is None, window.opens or 0.0
