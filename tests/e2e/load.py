"""Clients that create, look and release at the same time, and send again whatever got lost.

Each has a token of its own, so that the journal tells them apart, and makes one call at a time. A
call goes out with the same key until it is answered. Now and then a client gives up on a call that
got lost, as one that crashed would: then nobody knows what became of it, and the client is gone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.e2e.record import KEYED, LABEL, Call, Kind, Record
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
    """The allocations of one tenant that somebody may release, as far as its clients know."""

    living: list[str] = field(default_factory=list)

    def add(self, identity: str) -> None:
        """There is one more."""
        if identity not in self.living:
            self.living.append(identity)

    def draw(self, rng: random.Random, keep: float) -> str | None:
        """Any of them; with this chance it stays, so that another client draws it, too."""
        if not self.living:
            return None
        index = rng.randrange(len(self.living))
        if rng.random() < keep:
            return self.living[index]
        self.living[index], self.living[-1] = self.living[-1], self.living[index]
        return self.living.pop()


@dataclass(frozen=True)
class Habits:
    """How the clients behave."""

    full: int = 24
    """So many allocations of a tenant, and it rather releases."""
    gives_up: float = 0.2
    """The chance that a client is gone when a call of its got lost the first time."""
    looks: float = 0.1
    patience: float = PATIENCE_SECONDS
    longest_wait: float = 2.0
    longest_lease: float = 2.0


class Client:
    """One bearer of a token, who makes one call after the other."""

    def __init__(
        self,
        name: str,
        actor: str,
        secret: str,
        tenant: str,
        record: Record,
        pool: Pool,
        servers: Callable[[], Sequence[Address]],
        rng: random.Random,
        habits: Habits,
    ) -> None:
        self.name = name
        self.actor = actor
        self.secret = secret
        self.tenant = tenant
        self.alive = True
        self._record = record
        self._pool = pool
        self._servers = servers
        self._rng = rng
        self._habits = habits
        self._wire = Wire(secret, habits.patience)
        self._made = 0
        self._at = 0
        """Which server is asked."""

    async def run(self, halt: asyncio.Event) -> None:
        """Make calls until told to halt, or until it is gone; the last one is seen through."""
        try:
            while self.alive and not halt.is_set():
                await self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Break its connections; the next call opens others."""
        self._wire.close()

    async def step(self) -> None:
        """Make one call."""
        rng, pool = self._rng, self._pool
        if rng.random() < self._habits.looks:
            if rng.random() < 0.5 and pool.living:
                await self.get(rng.choice(pool.living))
            else:
                await self.look_at_cluster()
        elif rng.random() < len(pool.living) / (2 * self._habits.full):
            identity = pool.draw(rng, keep=0.1)
            assert identity is not None
            await self.release(identity)
        elif rng.random() < 0.08:
            await self.create_batch([self._terms(wait=False) for _ in range(rng.randint(2, 4))])
        else:
            await self.create(self._terms())

    # What is asked for

    def _terms(self, wait: bool = True) -> dict[str, Any]:
        rng, habits = self._rng, self._habits
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
            terms["lease_seconds"] = round(rng.uniform(0.05, habits.longest_lease), 3)
        if wait and rng.random() < 0.3:
            terms["wait_seconds"] = round(rng.uniform(0.05, habits.longest_wait), 3)
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
        return self._record.invoke(
            Call(
                actor=self.actor,
                tenant=self.tenant,
                kind=kind,
                key=key,
                method=method,
                path=path,
                body=b"" if body is None else msgspec.json.encode(body(key)),
                invoked=self._record.stamp(),
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
        await self._see_through(call)
        if call.status in (201, 202):
            self._pool.add(call.said()["id"])
        return call

    async def create_batch(self, every: Sequence[dict[str, Any]]) -> Call:
        """Create several, all or none."""
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
        await self._see_through(call)
        if call.status == 201:
            for allocation in call.said()["allocations"]:
                self._pool.add(allocation["id"])
        return call

    async def release(self, identity: str) -> Call:
        """Release an allocation."""
        call = self._call(Kind.RELEASE, "DELETE", f"/v1/allocations/{identity}", subject=identity)
        await self._see_through(call)
        return call

    async def turn(self, node: str, how: str) -> Call:
        """Cordon or uncordon a node."""
        call = self._call(Kind.TURN, "POST", f"/v1/nodes/{node}/{how}", subject=node)
        await self._see_through(call)
        return call

    async def get(self, identity: str) -> Call:
        """Look at an allocation."""
        call = self._call(Kind.GET, "GET", f"/v1/allocations/{identity}", subject=identity)
        await self._see_through(call)
        return call

    async def look_at_cluster(self) -> Call:
        """Look at the cluster."""
        call = self._call(Kind.CLUSTER, "GET", "/v1/cluster")
        await self._see_through(call)
        return call

    # How it is sent

    async def _see_through(self, call: Call) -> None:
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
                self._record.trouble(str(lost))
                if self._gives_up(call):
                    return
                self._at += 1
            else:
                behind = call.lagging and call.kind is Kind.GET and reply.status == 404
                if reply.status in _FINAL or behind:
                    replayed = "idempotency-replayed" in reply.headers
                    self._record.settle(call, reply.status, reply.body, replayed)
                    return
                if reply.status not in _AGAIN:
                    self._be_surprised(call, reply)
                    return
                self._record.trouble(_sentence(reply))
                if call.kind is Kind.MOVE and self._gives_up(call):
                    return
                self._at = _leader(reply, servers, self._at + 1)
            await asyncio.sleep(_PAUSE_SECONDS * self._rng.uniform(0.5, 1.5))

    def _gives_up(self, call: Call) -> bool:
        """Whether the client is gone now; moves bear no key, so they are never sent again."""
        chance = 1.0 if call.kind is Kind.MOVE else self._habits.gives_up
        if call.sent == 1 and self._rng.random() < chance:
            self.alive = False
        return not self.alive

    def _be_surprised(self, call: Call, reply: Reply) -> None:
        self._record.surprises.append(
            f"{call.method} {call.path} {call.body!r} with key {call.key}, sent {call.sent} times, "
            f"was answered {reply.status}: {reply.body.decode(errors='replace')}"
        )
        self._record.settle(call, reply.status, reply.body, False)


class Operator(Client):
    """A client that cordons nodes and moves instances about."""

    NODES = ("n2", "n3")

    async def step(self) -> None:
        """Make one call, and take a breath."""
        rng = self._rng
        if rng.random() < 0.5:
            how = rng.choice(("cordon", "uncordon", "uncordon"))
            await self.turn(rng.choice(self.NODES), how)
        else:
            await self.defragment()
        await asyncio.sleep(rng.random() * 0.05)

    async def defragment(self) -> None:
        """Ask for a plan, and have its moves made; by then some of them may be stale."""
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
            await self._see_through(call)


def _sentence(reply: Reply) -> str:
    said = msgspec.json.decode(reply.body)
    return f"{reply.status} {said['detail']}"


def _leader(reply: Reply, servers: Sequence[Address], otherwise: int) -> int:
    """Whom to ask next: the leader, if the answer names it."""
    leader = msgspec.json.decode(reply.body).get("leader")
    for index, (host, port) in enumerate(servers):
        if leader == f"http://{host}:{port}":
            return index
    return otherwise
