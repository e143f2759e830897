"""A typed client of the service, blocking (`Client`) or asynchronous (`AsyncClient`).

>>> from slicewise.client import Client
>>> with Client("http://127.0.0.1:8080", token="sw_...") as client:  # doctest: +SKIP
...     allocation = client.allocate("3g.40gb", lease_seconds=3600)
...     client.release(allocation.id)

Imports `api`, `journal` and `core`, and neither NumPy nor the engine: commands load it at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slicewise.api.agents import AgentView, ForeignView
from slicewise.api.allocations import AllocationBody, AllocationView, DryRun, NeedBody, PartView
from slicewise.api.base import Problem
from slicewise.api.cluster import ClusterView, ModelView, PolicyView
from slicewise.api.defrag import MoveBody, PlanView
from slicewise.api.events import EventView
from slicewise.api.health import ClockStepView, ClockView, Readiness
from slicewise.api.nodes import NodeDetail, NodeView
from slicewise.api.policy import PolicyStatus
from slicewise.api.stats import StatsView
from slicewise.api.tenants import NewTokenView, Quota, TenantView, TokenView, WhoView
from slicewise.client.blocking_client import Client
from slicewise.client.errors import ApiError, RejectedError, ResyncError, UnreachableError
from slicewise.core.request import Need
from slicewise.journal.entries import Part, Role

if TYPE_CHECKING:
    from slicewise.client.async_client import AsyncClient

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
    "PolicyStatus",
    "PolicyView",
    "Problem",
    "Quota",
    "Readiness",
    "RejectedError",
    "ResyncError",
    "Role",
    "StatsView",
    "TenantView",
    "TokenView",
    "UnreachableError",
    "WhoView",
]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import the asynchronous client on demand: the blocking one needs no asyncio."""
        if name != "AsyncClient":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from slicewise.client.async_client import AsyncClient

        return AsyncClient
