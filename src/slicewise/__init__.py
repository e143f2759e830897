"""slicewise: fragmentation-aware scheduling of NVIDIA Multi-Instance GPUs.

>>> import slicewise
>>> cluster = slicewise.Cluster.of(slicewise.load_geometry("A100-80GB"), gpus=1)
>>> scheduler = slicewise.Scheduler(cluster, "mfi")
>>> scheduler.submit("3g.40gb").start
0
"""

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from slicewise.catalog.library import Catalog, load_geometry
    from slicewise.core.cluster import Cluster, Instance, Node
    from slicewise.core.compute_fragmentation import (
        ComputeReading,
        Use,
        compute_score,
        compute_score_by_profile,
    )
    from slicewise.core.errors import (
        GeometryError,
        PlacementError,
        SlicewiseError,
        UnknownNameError,
    )
    from slicewise.core.fragmentation import (
        Reading,
        blocked_starts,
        is_fragmented,
        score,
        score_by_profile,
    )
    from slicewise.core.geometry import Budget, Geometry, Placement, Profile
    from slicewise.core.request import Need, Reason, Rejection, Request
    from slicewise.core.states import GpuState
    from slicewise.engine.defrag import Plan, Planner
    from slicewise.engine.dispatcher import Dispatcher, Tenancy
    from slicewise.engine.moves import Move, Moved, carry_out
    from slicewise.engine.queue import Queue, Ticket
    from slicewise.engine.reservation_rules import ReservationRules
    from slicewise.engine.reservations import Reservations
    from slicewise.engine.scheduler import Placed, PolicyError, Released, Scheduler
    from slicewise.engine.shares import Entitlement, Shares
    from slicewise.policies.base import (
        AdaptivePolicy,
        Policy,
        Preference,
        ScanPolicy,
        ScorePolicy,
        Spot,
        TablePolicy,
        Ties,
    )
    from slicewise.policies.registry import policy, policy_names

__version__ = "0.1.0"

__all__ = [
    "AdaptivePolicy",
    "Budget",
    "Catalog",
    "Cluster",
    "ComputeReading",
    "Dispatcher",
    "Entitlement",
    "Geometry",
    "GeometryError",
    "GpuState",
    "Instance",
    "Move",
    "Moved",
    "Need",
    "Node",
    "Placed",
    "Placement",
    "PlacementError",
    "Plan",
    "Planner",
    "Policy",
    "PolicyError",
    "Preference",
    "Profile",
    "Queue",
    "Reading",
    "Reason",
    "Rejection",
    "Released",
    "Request",
    "ReservationRules",
    "Reservations",
    "ScanPolicy",
    "Scheduler",
    "ScorePolicy",
    "Shares",
    "SlicewiseError",
    "Spot",
    "TablePolicy",
    "Tenancy",
    "Ticket",
    "Ties",
    "UnknownNameError",
    "Use",
    "__version__",
    "blocked_starts",
    "carry_out",
    "compute_score",
    "compute_score_by_profile",
    "is_fragmented",
    "load_geometry",
    "policy",
    "policy_names",
    "score",
    "score_by_profile",
]

# Names are looked up when they are asked for: an agent on a node is part of this package, and must
# not load the scheduler and NumPy with it.
_HOMES = {
    "slicewise.catalog.library": "Catalog load_geometry",
    "slicewise.core.cluster": "Cluster Instance Node",
    "slicewise.core.compute_fragmentation": (
        "ComputeReading Use compute_score compute_score_by_profile"
    ),
    "slicewise.core.errors": "GeometryError PlacementError SlicewiseError UnknownNameError",
    "slicewise.core.fragmentation": "Reading blocked_starts is_fragmented score score_by_profile",
    "slicewise.core.geometry": "Budget Geometry Placement Profile",
    "slicewise.core.request": "Need Reason Rejection Request",
    "slicewise.core.states": "GpuState",
    "slicewise.engine.defrag": "Plan Planner",
    "slicewise.engine.moves": "Move Moved carry_out",
    "slicewise.engine.dispatcher": "Dispatcher ReservationRules Tenancy",
    "slicewise.engine.queue": "Queue Ticket",
    "slicewise.engine.reservations": "Reservations",
    "slicewise.engine.shares": "Entitlement Shares",
    "slicewise.engine.scheduler": "Placed PolicyError Released Scheduler",
    "slicewise.policies.base": (
        "AdaptivePolicy Policy Preference ScanPolicy ScorePolicy Spot TablePolicy Ties"
    ),
    "slicewise.policies.registry": "policy policy_names",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


if not _typing.TYPE_CHECKING:  # or a misspelt name would look like a good one

    def __getattr__(name: str) -> object:
        """A public name, from the module that has it."""
        if name not in _HOME:
            raise AttributeError(f"module 'slicewise' has no attribute {name!r}")
        value = globals()[name] = getattr(_import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
