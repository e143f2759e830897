"""A typed client of the service, in two forms: `Client` waits, `AsyncClient` is awaited.

>>> from slicewise.client import Client
>>> with Client("http://127.0.0.1:8080", token="sw_...") as client:  # doctest: +SKIP
...     allocation = client.allocate("3g.40gb", lease_seconds=3600)
...     client.release(allocation.id)
"""

from slicewise.client.aio import AsyncClient
from slicewise.client.blocking import Client
from slicewise.client.errors import ApiError, RejectedError, ResyncError, UnreachableError
from slicewise.control.agent_wire import AgentView, ForeignView
from slicewise.control.entries import Part, Role
from slicewise.control.lately import LatelyView
from slicewise.control.reports import (
    ClusterView,
    DryRun,
    EventView,
    ModelView,
    MoveBody,
    NodeDetail,
    PlanView,
    PolicyView,
    Readiness,
    WhoView,
)
from slicewise.control.wire import (
    AllocationBody,
    AllocationView,
    ClockStepView,
    ClockView,
    NeedBody,
    NewTokenView,
    NodeView,
    PartView,
    Problem,
    Quota,
    TenantView,
    TokenView,
)
from slicewise.core.request import Need

__all__ = [
    "AgentView",
    "AllocationBody",
    "AllocationView",
    "ApiError",
    "AsyncClient",
    "Client",
    "ClockStepView",
    "ClockView",
    "ClusterView",
    "DryRun",
    "EventView",
    "ForeignView",
    "LatelyView",
    "ModelView",
    "MoveBody",
    "Need",
    "NeedBody",
    "NewTokenView",
    "NodeDetail",
    "NodeView",
    "Part",
    "PartView",
    "PlanView",
    "PolicyView",
    "Problem",
    "Quota",
    "Readiness",
    "RejectedError",
    "ResyncError",
    "Role",
    "TenantView",
    "TokenView",
    "UnreachableError",
    "WhoView",
]
