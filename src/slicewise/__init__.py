"""slicewise: fragmentation-aware scheduling of NVIDIA Multi-Instance GPUs.

>>> import slicewise
>>> cluster = slicewise.Cluster.of(slicewise.load_geometry("A100-80GB"), gpus=1)
>>> scheduler = slicewise.Scheduler(cluster, "mfi")
>>> scheduler.submit("3g.40gb").start
0
"""

from slicewise.catalog.library import Catalog, load_geometry
from slicewise.core.cluster import Cluster, Instance, Node
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
from slicewise.engine.moves import Move, Moved, carry_out
from slicewise.engine.queue import Discipline, Ticket, WaitingRoom
from slicewise.engine.scheduler import Placed, PolicyError, Released, Scheduler
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
    "Discipline",
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
    "Reading",
    "Reason",
    "Rejection",
    "Released",
    "Request",
    "ScanPolicy",
    "Scheduler",
    "ScorePolicy",
    "SlicewiseError",
    "Spot",
    "TablePolicy",
    "Ticket",
    "Ties",
    "UnknownNameError",
    "WaitingRoom",
    "__version__",
    "blocked_starts",
    "carry_out",
    "is_fragmented",
    "load_geometry",
    "policy",
    "policy_names",
    "score",
    "score_by_profile",
]
