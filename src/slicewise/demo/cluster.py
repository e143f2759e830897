"""The cluster of the demonstration: its nodes, its tenants, and the profiles they request."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from slicewise.client import AsyncClient, Quota, RejectedError, Role
from slicewise.core.errors import SlicewiseError

NODES = (
    ("dgx-01", "A100-80GB", 8),
    ("dgx-02", "A100-80GB", 8),
    ("hgx-01", "H100-80GB-SXM5", 8),
    ("hgx-02", "H100-80GB-SXM5", 8),
    ("edge-01", "A30-24GB", 4),
)
NOTE = "demonstration"
"""Marks the tokens of the demonstration; the next run revokes them."""

UNLIMITED = Quota()


@dataclass(frozen=True)
class DemoTenant:
    """A tenant of the demonstration."""

    name: str
    weights: dict[str, float]
    """How often each profile is requested."""
    share: float
    """The share of all requests."""
    quota: Quota = UNLIMITED
    wait_seconds: float = 0
    """A tenant that waits holds its allocations by a lease; the others release them."""
    priority: int = 0


TENANTS = (
    # Only a tenant that does not wait requests A30 profiles: a queued one would block the queue.
    DemoTenant("notebooks", {"1g.10gb": 5, "2g.20gb": 2, "1g.6gb": 2, "2g.12gb": 1}, 0.45),
    DemoTenant(
        "inference",
        {"1g.10gb": 3, "2g.20gb": 3, "3g.40gb": 2},
        0.3,
        wait_seconds=20,
        priority=10,
    ),
    DemoTenant(
        "training",
        {"3g.40gb": 3, "4g.40gb": 2, "7g.80gb": 2},
        0.25,
        Quota(memory_slices=128),
        wait_seconds=60,
    ),
)


async def set_up(client: AsyncClient, agents: bool = False) -> dict[str, str]:
    """Register missing nodes and tenants; returns a new token for each tenant.

    Allocations of an earlier run that was killed are released. With ``agents``, the agents register
    the nodes.
    """
    if not agents:
        await _add_nodes(client)
    every = [token async for token in client.tokens() if token.note == NOTE]
    old = [token.id for token in every if token.role == Role.TENANT]
    for identity in old:
        await client.revoke_token(identity)
    secrets = {}
    for tenant in TENANTS:
        await _ignore_existing(client.add_tenant(tenant.name, tenant.quota))
        left = [one.id async for one in client.allocations(tenant=tenant.name)]
        for identity in left:
            await client.release(identity)
        issued = await client.issue_token(Role.TENANT, tenant=tenant.name, note=NOTE)
        secrets[tenant.name] = issued.token
    return secrets


async def _add_nodes(client: AsyncClient) -> None:
    managed = [node.name async for node in client.nodes() if node.managed]
    if managed:
        raise SlicewiseError(
            f"this demonstration was run with --agents, and {managed[0]} needs its agent: "
            "use --agents again, or choose another folder with --data DIR"
        )
    for name, model, gpus in NODES:
        await _ignore_existing(client.add_node(name, model, gpus))


async def _ignore_existing(call: Awaitable[object]) -> None:
    try:
        await call
    except RejectedError as rejection:
        if rejection.reason != "exists":
            raise
