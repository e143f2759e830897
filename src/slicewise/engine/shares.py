"""What each tenant uses, and whose turn it is: the order in which waiting requests are served.

A tenant's share of a kind of request is its dominant share of the GPU models that could serve it:
the larger of its parts of their memory slices and of their compute slices, divided by the tenant's
weight. So the use of other models has no influence.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from slicewise.core.geometry import Geometry
from slicewise.core.request import Request

FULL_PRICE = 100
"""Usage is counted in hundredths of slices, so that sums are exact."""

_REMEMBERED_REQUESTS = 1024
"""The limit on remembered requests: clients choose them, so memory must be bounded."""

Order = tuple[bool, int, float, int, int, int]
"""Whether beyond the guarantee, priority among tenants, share, the tenant's first waiting request,
priority within the tenant, and the request's number."""


@dataclass(frozen=True, slots=True)
class Entitlement:
    """What the operator grants a tenant in the queue."""

    weight: float = 1.0
    """A tenant of twice the weight may use twice as much at the same share."""
    guarantee: int = 0
    """Memory slices: a request that stays within it goes before those that do not."""
    max_priority: int = 0
    """Up to this, the priority of a request counts among tenants, too."""


class Shares:
    """The usage of tenants by GPU model, and the order that follows from it."""

    def __init__(self) -> None:
        self._entitled: dict[str, Entitlement] = {}
        self._memory: defaultdict[str, Counter[Geometry]] = defaultdict(Counter)
        self._compute: defaultdict[str, Counter[Geometry]] = defaultdict(Counter)
        self._slices: Counter[str] = Counter()
        self._gpus: Counter[Geometry] = Counter()
        self._models: dict[Request, tuple[Geometry, ...]] = {}
        self._capacity: dict[tuple[Geometry, ...], tuple[int, int]] = {}
        self._sizes: dict[Request, int] = {}

    # Updates

    def entitle(self, tenant: str, entitlement: Entitlement) -> None:
        """Set what a tenant is entitled to."""
        self._entitled[tenant] = entitlement

    def forget(self, tenant: str) -> None:
        """Forget a tenant that holds nothing."""
        for known in (self._entitled, self._memory, self._compute, self._slices):
            known.pop(tenant, None)

    def add_gpus(self, geometry: Geometry, gpus: int) -> None:
        """Add GPUs of a model to the capacity, or remove them with a negative number."""
        self._gpus[geometry] += gpus
        if not self._gpus[geometry]:
            del self._gpus[geometry]
        self._models.clear()
        self._capacity.clear()
        self._sizes.clear()

    def charge(
        self, tenant: str, geometry: Geometry, memory: int, compute: int, price: int = FULL_PRICE
    ) -> None:
        """Count an instance of a tenant; with negative slices, count it no longer."""
        self._memory[tenant][geometry] += memory * price
        self._compute[tenant][geometry] += compute * price
        self._slices[tenant] += memory

    # Queries

    def entitlement(self, tenant: str) -> Entitlement:
        """What a tenant is entitled to."""
        return self._entitled.get(tenant, _NOTHING_SPECIAL)

    def slices(self, tenant: str) -> int:
        """The memory slices that a tenant holds."""
        return self._slices[tenant]

    def of(self, tenant: str, request: Request) -> float:
        """A tenant's dominant share of the models that could serve a request, by its weight."""
        models = self.models(request)
        if not models:
            return 0.0
        memory, compute = self._capacity[models]
        mine, mine_compute = self._memory.get(tenant), self._compute.get(tenant)
        if not mine or not mine_compute:
            return 0.0
        share = max(
            sum(mine[geometry] for geometry in models) / memory,
            sum(mine_compute[geometry] for geometry in models) / compute,
        )
        return share / FULL_PRICE / self.entitlement(tenant).weight

    def within_guarantee(self, tenant: str, request: Request, count: int) -> bool:
        """Whether a tenant stays within its guarantee with these instances."""
        guarantee = self.entitlement(tenant).guarantee
        if not guarantee:
            return False
        return self._slices[tenant] + self.size(request) * count <= guarantee

    def order(
        self, tenant: str, request: Request, count: int, priority: int, number: int, first: int
    ) -> Order:
        """The position of a waiting request: the lowest is served first.

        ``first`` is the lowest number of a waiting request of the tenant. It settles ties between
        tenants, so that their own priorities do not.
        """
        return (
            not self.within_guarantee(tenant, request, count),
            -min(priority, self.entitlement(tenant).max_priority),
            self.of(tenant, request),
            first,
            -priority,
            number,
        )

    def models(self, request: Request) -> tuple[Geometry, ...]:
        """The models in the cluster that could serve a request."""
        models = self._models.get(request)
        if models is None:
            models = tuple(g for g in self._gpus if request.candidates(g))
            if len(self._models) == _REMEMBERED_REQUESTS:
                self._models.clear()
            self._models[request] = models
            self._capacity[models] = (
                _sum(self._gpus[g] * g.slices for g in models),
                _sum(self._gpus[g] * g.compute for g in models),
            )
        return models

    @property
    def all_models(self) -> Iterable[Geometry]:
        """The models in the cluster."""
        return self._gpus.keys()

    def gpus(self, geometry: Geometry) -> int:
        """The number of GPUs of a model."""
        return self._gpus[geometry]

    def size(self, request: Request) -> int:
        """The memory slices that an instance takes at least."""
        size = self._sizes.get(request)
        if size is None:
            sizes = [request.least_size(geometry) for geometry in self.models(request)]
            if len(self._sizes) == _REMEMBERED_REQUESTS:
                self._sizes.clear()
            size = self._sizes[request] = min(sizes, default=0)
        return size


_NOTHING_SPECIAL = Entitlement()


def _sum(amounts: Iterable[int]) -> int:
    """Return the sum, and at least 1: a capacity to divide by."""
    return max(1, sum(amounts))
