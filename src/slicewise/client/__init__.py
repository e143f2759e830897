"""A typed client of the service, in two forms: `Client` waits, `AsyncClient` is awaited.

>>> from slicewise.client import Client
>>> with Client("http://127.0.0.1:8080", token="sw_...") as client:  # doctest: +SKIP
...     allocation = client.allocate("3g.40gb", lease_seconds=3600)
...     client.release(allocation.id)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from slicewise.client.aio import AsyncClient

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


if not TYPE_CHECKING:  # or a misspelt name would look like a good one

    def __getattr__(name: str) -> object:
        """The asynchronous client; the blocking one does without asyncio."""
        if name != "AsyncClient":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from slicewise.client.aio import AsyncClient

        return AsyncClient
