"""Concurrent clients that create, read and release allocations, and retry lost calls.

Each has its own token, which identifies it in the journal, and makes one call at a time. A call is
sent with the same key until it is answered. Sometimes a client abandons a lost call, as after a
crash: the outcome of the call is then unknown, and the client is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.e2e.call_log import KEYED, LABEL, Call, CallLog, Kind
from tests.e2e.server import Address
from tests.e2e.wire import LostError, Reply, Wire

PATIENCE_SECONDS = 5.0
_PAUSE_SECONDS = 0.03
_FINAL = frozenset({200, 201, 202, 409})
_AGAIN = frozenset({429, 503})

PROFILES = {
    "1g.10gb": 6,
    "1g.10gb+me": 1,
    "1g.20gb": 1,
    "2g.20gb": 4,
    "3g.40gb": 4,
    "4g.40gb": 2,
    "7g.80gb": 1,
    "1g.6gb": 2,
    "2g.12gb": 2,
    "4g.24gb": 1,
}
_NEEDS = ((1, 5.0), (1, 9.5), (1, 15.0), (2, 12.0), (2, 24.0))


@dataclass
class Pool:
    """The allocations of one tenant that its clients may release."""

    allocations: list[str] = field(default_factory=list)

    def add(self, identity: str) -> None:
        """Add an allocation."""
        if identity not in self.allocations:
            self.allocations.append(identity)

    def draw(self, rng: random.Random, keep: float) -> str | None:
        """Draw an allocation; with probability ``keep`` it stays, and another client may draw it
        too."""
        if not self.allocations:
            return None
        index = rng.randrange(len(self.allocations))
        if rng.random() < keep:
            return self.allocations[index]
        self.allocations[index], self.allocations[-1] = (
            self.allocations[-1],
            self.allocations[index],
        )
        return self.allocations.pop()


@dataclass(frozen=True)
class Behavior:
    """Parameters of the clients' behavior."""

    full: int = 24
    """Number of allocations above which a tenant prefers to release."""
    gives_up: float = 0.2
    """Probability that a client is gone after the first loss of a call."""
    looks: float = 0.1
    patience: float = PATIENCE_SECONDS
    longest_wait: float = 2.0
    longest_lease: float = 2.0


class Client:
    """A client with a token, which makes one call at a time."""

    def __init__(
        self,
        name: str,
        actor: str,
        secret: str,
        tenant: str,
        record: CallLog,
        pool: Pool,
        servers: Callable[[], Sequence[Address]],
        rng: random.Random,
        behavior: Behavior,
    ) -> None:
        self.name = name
        self.actor = actor
        self.secret = secret
        self.tenant = tenant
        self.alive = True
        self._call_log = record
        self._pool = pool
        self._servers = servers
        self._rng = rng
        self._behavior = behavior
        self._wire = Wire(secret, behavior.patience)
        self._made = 0
        self._at = 0
        """Index of the server to call."""

    async def run(self, halt: asyncio.Event) -> None:
        """Make calls until ``halt`` is set or the client is gone; the last call is completed."""
        try:
            while self.alive and not halt.is_set():
                await self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._wire.close()

    async def step(self) -> None:
        """Make one call."""
        rng, pool = self._rng, self._pool
        if rng.random() < self._behavior.looks:
            if rng.random() < 0.5 and pool.allocations:
                await self.get(rng.choice(pool.allocations))
            else:
                await self.get_cluster()
        elif rng.random() < len(pool.allocations) / (2 * self._behavior.full):
            identity = pool.draw(rng, keep=0.1)
            assert identity is not None
            await self.release(identity)
        elif rng.random() < 0.08:
            await self.create_batch([self._terms(wait=False) for _ in range(rng.randint(2, 4))])
        else:
            await self.create(self._terms())

    # Calls

    def _terms(self, wait: bool = True) -> dict[str, Any]:
        rng, behavior = self._rng, self._behavior
        terms: dict[str, Any] = {}
        if rng.random() < 0.2:
            compute, memory = rng.choice(_NEEDS)
            terms["need"] = {"compute": compute, "memory_gb": memory}
        else:
            terms["profile"] = rng.choices(list(PROFILES), list(PROFILES.values()))[0]
        if rng.random() < 0.1:
            small = terms.get("profile", "1g.6gb") in ("1g.6gb", "2g.12gb", "4g.24gb")
            terms["models"] = ["A30-24GB" if small else "A100-80GB"]
        if rng.random() < 0.15:
            terms["count"] = rng.randint(2, 3)
        if rng.random() < 0.3:
            terms["priority"] = rng.randint(-1, 2)
        if rng.random() < 0.15:
            terms["lease_seconds"] = round(rng.uniform(0.05, behavior.longest_lease), 3)
        if wait and rng.random() < 0.3:
            terms["wait_seconds"] = round(rng.uniform(0.05, behavior.longest_wait), 3)
        return terms

    def _call(
        self,
        kind: Kind,
        method: str,
        path: str,
        body: Callable[[str], object] | None = None,
        subject: str = "",
    ) -> Call:
        self._made += 1
        key = f"{self.name}-{self._made}"
        return self._call_log.invoke(
            Call(
                actor=self.actor,
                tenant=self.tenant,
                kind=kind,
                key=key,
                method=method,
                path=path,
                body=b"" if body is None else msgspec.json.encode(body(key)),
                invoked=self._call_log.stamp(),
                subject=subject,
            )
        )

    async def create(self, terms: dict[str, Any]) -> Call:
        """Create an allocation."""
        call = self._call(
            Kind.CREATE,
            "POST",
            "/v1/allocations",
            lambda key: terms | {"labels": {LABEL: key}},
        )
        await self._send_until_answered(call)
        if call.status in (201, 202):
            self._pool.add(call.decoded()["id"])
        return call

    async def create_batch(self, every: Sequence[dict[str, Any]]) -> Call:
        """Create several allocations, all or none."""
        call = self._call(
            Kind.BATCH,
            "POST",
            "/v1/allocations/batch",
            lambda key: {
                "allocations": [
                    terms | {"labels": {LABEL: f"{key}/{index}"}}
                    for index, terms in enumerate(every)
                ]
            },
        )
        await self._send_until_answered(call)
        if call.status == 201:
            for allocation in call.decoded()["allocations"]:
                self._pool.add(allocation["id"])
        return call

    async def release(self, identity: str) -> Call:
        """Release an allocation."""
        call = self._call(Kind.RELEASE, "DELETE", f"/v1/allocations/{identity}", subject=identity)
        await self._send_until_answered(call)
        return call

    async def cordon(self, node: str, how: str) -> Call:
        """Cordon or uncordon a node."""
        call = self._call(Kind.CORDON, "POST", f"/v1/nodes/{node}/{how}", subject=node)
        await self._send_until_answered(call)
        return call

    async def get(self, identity: str) -> Call:
        """Read an allocation."""
        call = self._call(Kind.GET, "GET", f"/v1/allocations/{identity}", subject=identity)
        await self._send_until_answered(call)
        return call

    async def get_cluster(self) -> Call:
        """Read the cluster."""
        call = self._call(Kind.CLUSTER, "GET", "/v1/cluster")
        await self._send_until_answered(call)
        return call

    # Sending

    async def _send_until_answered(self, call: Call) -> None:
        """Send a call until it is answered, or the client is gone."""
        while self.alive:
            servers = self._servers()
            server = servers[self._at % len(servers)]
            call.sent += 1
            call.lagging = len(servers) > 1
            try:
                key = call.key if call.kind in KEYED else None
                reply = await self._wire.ask(server, call.method, call.path, call.body, key)
            except LostError as lost:
                self._call_log.record_retry(str(lost))
                if self._gives_up(call):
                    return
                self._at += 1
            else:
                behind = call.lagging and call.kind is Kind.GET and reply.status == 404
                if reply.status in _FINAL or behind:
                    replayed = "idempotency-replayed" in reply.headers
                    self._call_log.settle(call, reply.status, reply.body, replayed)
                    return
                if reply.status not in _AGAIN:
                    self._record_unexpected(call, reply)
                    return
                self._call_log.record_retry(_sentence(reply))
                if call.kind is Kind.MOVE and self._gives_up(call):
                    return
                self._at = _leader(reply, servers, self._at + 1)
            await asyncio.sleep(_PAUSE_SECONDS * self._rng.uniform(0.5, 1.5))

    def _gives_up(self, call: Call) -> bool:
        """Return whether the client is gone now; moves have no key, so they are never retried."""
        chance = 1.0 if call.kind is Kind.MOVE else self._behavior.gives_up
        if call.sent == 1 and self._rng.random() < chance:
            self.alive = False
        return not self.alive

    def _record_unexpected(self, call: Call, reply: Reply) -> None:
        self._call_log.unexpected.append(
            f"{call.method} {call.path} {call.body!r} with key {call.key}, sent {call.sent} times, "
            f"was answered {reply.status}: {reply.body.decode(errors='replace')}"
        )
        self._call_log.settle(call, reply.status, reply.body, False)


class Operator(Client):
    """A client that cordons nodes and moves instances."""

    NODES = ("n2", "n3")

    async def step(self) -> None:
        """Make one call, then pause."""
        rng = self._rng
        if rng.random() < 0.5:
            how = rng.choice(("cordon", "uncordon", "uncordon"))
            await self.cordon(rng.choice(self.NODES), how)
        else:
            await self.defragment()
        await asyncio.sleep(rng.random() * 0.05)

    async def defragment(self) -> None:
        """Request a plan and carry out its moves; some of them may be stale by then."""
        servers = self._servers()
        try:
            reply = await self._wire.ask(
                servers[self._at % len(servers)], "GET", "/v1/defrag/plan?budget=3"
            )
        except LostError:
            return
        moves = msgspec.json.decode(reply.body).get("moves")
        if moves:
            call = self._call(Kind.MOVE, "POST", "/v1/defrag", lambda key: {"moves": moves})
            await self._send_until_answered(call)


def _sentence(reply: Reply) -> str:
    content = msgspec.json.decode(reply.body)
    return f"{reply.status} {content['detail']}"


def _leader(reply: Reply, servers: Sequence[Address], otherwise: int) -> int:
    """Return the server to call next: the leader, if the answer names it."""
    leader = msgspec.json.decode(reply.body).get("leader")
    for index, (host, port) in enumerate(servers):
        if leader == f"http://{host}:{port}":
            return index
    return otherwise
