"""The scene of the demonstration: nodes, tenants, and what each of them likes to ask for."""

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
"""By which its tokens are known when it is started again."""

UNLIMITED = Quota()


@dataclass(frozen=True)
class Guest:
    """A tenant of the demonstration."""

    name: str
    likes: dict[str, float]
    """By profile: how often it is asked for."""
    share: float
    """Of all requests."""
    quota: Quota = UNLIMITED
    wait_seconds: float = 0
    """Those who wait hold what they get by a lease; the others give it back themselves."""
    priority: int = 0


GUESTS = (
    # Only those who do not wait ask for an A30: one that waits for it would hold up the rest.
    Guest("notebooks", {"1g.10gb": 5, "2g.20gb": 2, "1g.6gb": 2, "2g.12gb": 1}, 0.45),
    Guest(
        "inference",
        {"1g.10gb": 3, "2g.20gb": 3, "3g.40gb": 2},
        0.3,
        wait_seconds=20,
        priority=10,
    ),
    Guest(
        "training",
        {"3g.40gb": 3, "4g.40gb": 2, "7g.80gb": 2},
        0.25,
        Quota(memory_slices=128),
        wait_seconds=60,
    ),
)


async def set_up(client: AsyncClient, agents: bool = False) -> dict[str, str]:
    """Register nodes and tenants that are not there yet; returns a fresh token of each tenant.

    What an earlier demonstration left behind, because it was killed say, is given back. Agents
    register their nodes themselves.
    """
    if not agents:
        await _add_nodes(client)
    every = [token async for token in client.tokens() if token.note == NOTE]
    old = [token.id for token in every if token.role == Role.TENANT]
    for identity in old:
        await client.revoke_token(identity)
    secrets = {}
    for guest in GUESTS:
        await _unless_there(client.add_tenant(guest.name, guest.quota))
        left = [one.id async for one in client.allocations(tenant=guest.name)]
        for identity in left:
            await client.release(identity)
        issued = await client.issue_token(Role.TENANT, tenant=guest.name, note=NOTE)
        secrets[guest.name] = issued.token
    return secrets


async def _add_nodes(client: AsyncClient) -> None:
    managed = [node.name async for node in client.nodes() if node.managed]
    if managed:
        raise SlicewiseError(
            f"this demonstration was run with --agents, and {managed[0]} waits for its own: "
            "say --agents again, or choose another folder with --data DIR"
        )
    for name, model, gpus in NODES:
        await _unless_there(client.add_node(name, model, gpus))


async def _unless_there(call: Awaitable[object]) -> None:
    try:
        await call
    except RejectedError as rejection:
        if rejection.reason != "exists":
            raise
