"""The queue and its dispatcher without shortcuts: they look at every line and order all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from slicewise.core.geometry import Geometry
from slicewise.core.request import Rejection
from slicewise.engine.dispatcher import Dispatcher
from slicewise.engine.queue import Attempt, Line, Queue
from slicewise.engine.reservations import LineKey


class PlainQueue(Queue):
    """Looks at every line in every pass, and puts all that may fit in order."""

    def serve(
        self,
        attempt: Callable[[Attempt], Rejection | None],
        may_fit: Callable[[Line], bool],
        lines: Iterable[Line],
        now: float = 0.0,
    ) -> None:
        super().serve(attempt, may_fit, filter(may_fit, self.lines()), now)


class PlainDispatcher(Dispatcher):
    """Counts the reserved windows again for each line, and looks at all lines in fair order."""

    def grant(self, now: float) -> bool:
        self._next_due = math.inf
        if self._scheduler.scans:
            return False
        for line in self.queue.lines():
            ticket = self._next_without_window(line)
            if ticket is None or not self._is_due(ticket, now):
                continue
            if not self.queue.was_overtaken(ticket) or line.key in self._unfindable:
                continue
            below = self._below_caps(line.key)
            if sum(below.values()) < ticket.count or self._tenancy.over_quota(ticket) is not None:
                continue
            ends = self._tenancy.ends
            found = self.reservations.find(ticket.request, ticket.count, below, ends, now)
            if found is not None:
                self._tenancy.reserve(line.key, (*self.reservations.of(line.key), *found))
                return True
            self._unfindable.add(line.key)
        return False

    def _below_caps(self, line: LineKey) -> dict[Geometry, int]:
        cluster, shares = self._scheduler.cluster, self.queue.shares
        total: Counter[Geometry] = Counter()
        own: Counter[Geometry] = Counter()
        for key, pool in self.reservations:
            models = Counter(cluster.state(window.gpu).geometry for window in pool)
            total += models
            if key.tenant == line.tenant:
                own += models
        below = {}
        for geometry in shares.models(line.request):
            most = self.rules.most(shares.gpus(geometry))
            of_tenant = max(1, most // 2) if most else 0
            if (left := min(most - total[geometry], of_tenant - own[geometry])) > 0:
                below[geometry] = left
        return below
