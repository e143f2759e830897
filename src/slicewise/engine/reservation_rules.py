"""The rules of reservations: when windows are reserved, and how many at most."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slicewise.core.cluster import Cluster
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.core.request import Request
from slicewise.engine.reservations import LineKey, Reservations
from slicewise.engine.shares import Shares


@dataclass(frozen=True, slots=True)
class ReservationRules:
    """When windows are reserved for waiting requests, and how many."""

    after: float = 300.0
    """How long a request waits before a window is reserved for it; infinity is never."""
    share: float = 0.10
    """The largest share of the GPUs of a model with a reserved window; half of it per tenant."""

    def __post_init__(self) -> None:
        if not self.after >= 0:
            raise SlicewiseError(f"reservations after {self.after}: it must not be negative")
        if not 0 <= self.share <= 1:
            raise SlicewiseError(f"the share of reserved GPUs must be 0 to 1, not {self.share}")

    def most(self, gpus: int) -> int:
        """The most reserved GPUs among so many: at least one, if any may be reserved."""
        return max(1, int(gpus * self.share)) if self.share and gpus else 0


class Caps:
    """How many more windows each tenant may have, as the reservations are when this is made."""

    def __init__(
        self, rules: ReservationRules, reservations: Reservations, cluster: Cluster, shares: Shares
    ) -> None:
        self._shares = shares
        self._most = {model: rules.most(shares.gpus(model)) for model in shares.all_models}
        self._total: Counter[Geometry] = Counter()
        self._own: Counter[tuple[str, Geometry]] = Counter()
        self._left: dict[tuple[str, Request], dict[Geometry, int]] = {}
        for line, pool in reservations:
            for window in pool:
                model = cluster.state(window.gpu).geometry
                self._total[model] += 1
                self._own[line.tenant, model] += 1

    @property
    def reached(self) -> bool:
        """Whether no tenant may have another window on any GPU model."""
        return all(self._total[model] >= most for model, most in self._most.items())

    def allow(self, line: LineKey) -> bool:
        """Whether the next request of a line may have its windows."""
        return sum(self.left(line).values()) >= line.instances

    def left(self, line: LineKey) -> dict[Geometry, int]:
        """How many more windows a line may have, by GPU model."""
        known = self._left.get((line.tenant, line.request))
        if known is None:
            known = self._left[line.tenant, line.request] = self._count(line)
        return known

    def _count(self, line: LineKey) -> dict[Geometry, int]:
        below = {}
        for model in self._shares.models(line.request):
            most = self._most[model]
            of_tenant = max(1, most // 2) if most else 0
            left = min(most - self._total[model], of_tenant - self._own[line.tenant, model])
            if left > 0:
                below[model] = left
        return below
