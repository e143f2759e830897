"""The stage: tenants, nodes and a troop of clients on one or more servers, and what came of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.history import Verdict, check
from tests.e2e.load import Client, Habits, Operator, Pool
from tests.e2e.record import KEYED, Record
from tests.e2e.server import Address, Server
from tests.e2e.standing import compare
from tests.e2e.wire import Wire

from slicewise.control.entries import Row, decode
from slicewise.control.state import State
from slicewise.engine.queue import Discipline
from slicewise.store import open_contents, verify

NODES = (
    ("n0", "A100-80GB", 4),
    ("n1", "A100-80GB", 4),
    ("n2", "A30-24GB", 4),
    ("n3", "A100-80GB", 2),
)
TENANTS: dict[str, dict[str, Any]] = {
    "red": {},
    "green": {},
    "blue": {"memory_slices": 30, "instances": 12},
}
BACKFILL, OVERTAKES = 3, 4
SETTINGS = (
    f"queue.backfill={BACKFILL}",
    f"queue.overtakes={OVERTAKES}",
    "lease.seconds=0.5",
    "limits.requests_per_second=1000000",
)


@dataclass
class Stage:
    """A troop of clients and the record of what they did."""

    seed: int
    clients: int = 12
    operated: bool = False
    """Whether an operator is among them, who cordons nodes and moves instances."""
    policy: str = "default"
    habits: Habits = field(default_factory=Habits)
    servers: list[Server] = field(default_factory=list)
    record: Record = field(default_factory=Record)
    troop: list[Client] = field(default_factory=list)
    staff: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._pools = {name: Pool() for name in TENANTS}
        self._hired = 0

    def addresses(self) -> Sequence[Address]:
        """The servers, wherever they are at the moment."""
        return [server.address for server in self.servers]

    # Setting up

    def furnish(self, server: Server) -> None:
        """Register tenants and nodes."""
        for name, quota in TENANTS.items():
            _expect(201, server.ask("POST", "/v1/tenants", {"name": name, "quota": quota}))
        for name, model, gpus in NODES:
            body = {"name": name, "model": model, "gpus": gpus}
            _expect(201, server.ask("POST", "/v1/nodes", body))

    def recruit(self, server: Server) -> None:
        """Fill the ranks: a new client, with a new token, for every one that is gone."""
        self.staff.add(_expect(200, server.ask("GET", "/v1/whoami"))["id"])
        self.troop = [client for client in self.troop if client.alive]
        if self.operated and not any(isinstance(client, Operator) for client in self.troop):
            self.troop.append(self._hire(server, None))
        while len(self.troop) < self.clients:
            names = list(TENANTS)
            self.troop.append(self._hire(server, names[self._hired % len(names)]))

    def _hire(self, server: Server, tenant: str | None) -> Client:
        """A client with a token of its own; an operator belongs to no tenant."""
        self._hired += 1
        kind, role = (Operator, "operator") if tenant is None else (Client, "tenant")
        body = {"role": role} | ({} if tenant is None else {"tenant": tenant})
        token = _expect(201, server.ask("POST", "/v1/tokens", body))
        return kind(
            f"c{self._hired}",
            token["id"],
            token["token"],
            tenant or "",
            self.record,
            self._pools.get(tenant or "", Pool()),
            self.addresses,
            random.Random(self.rng.random()),
            self.habits,
        )

    # What came of it

    def look(self, server: Server) -> None:
        """Nobody waits for an answer: what is there must be what was answered."""
        problems, allocations = compare(self.record, server)
        assert not problems, self._tell(problems, server)
        for one in allocations:  # those of clients who are gone can be released by others
            self._pools[one["tenant"]].add(one["id"])

    async def ask_again(self, sample: int) -> int:
        """Send calls again that were answered long ago; returns how many gave the same answer."""
        kept = [call for call in self.record.calls if call.known and call.kind in KEYED]
        chosen = self.rng.sample(kept, min(sample, len(kept)))
        secrets = {client.actor: client.secret for client in self.troop}
        asked = 0
        for call in chosen:
            if call.actor not in secrets:
                continue
            wire = Wire(secrets[call.actor], self.habits.patience)
            reply = await wire.ask(self.addresses()[0], call.method, call.path, call.body, call.key)
            wire.close()
            asked += 1
            assert (reply.status, reply.body) == (call.status, call.answer), (
                f"call {call.key} was first told {call.status} {call.answer!r}, "
                f"then {reply.status} {reply.body!r}"
            )
        return asked

    def judge(self, server: Server) -> Verdict:
        """Have the history checked."""
        verdict = check(journal(server), self.record.calls, self.fresh_state, self.staff)
        assert not self.record.surprises, self._tell(self.record.surprises, server)
        assert verdict.clean, self._tell(verdict.complaints, server)
        return verdict

    def fresh_state(self) -> State:
        """The state of a service with these settings that knows nothing yet."""
        return State(self.policy, Discipline(BACKFILL, OVERTAKES))

    def _tell(self, problems: Sequence[str], server: Server) -> str:
        lines = "\n".join(problems[:20])
        return f"seed {self.seed}, {len(problems)} problems:\n{lines}\n{server.last_lines()}"


async def perform(stage: Stage, halt: asyncio.Event) -> None:
    """Let every client work until told to halt, and see its last call through."""
    await asyncio.gather(*(client.run(halt) for client in stage.troop))


def journal(server: Server) -> list[Row]:
    """The whole journal of a server, which may be running."""
    with _contents(server) as contents:
        list(contents.images())
        list(contents.answers())
        return [
            Row(row.seq, row.at, row.actor, decode(row.data), row.origin) for row in contents.rows()
        ]


def verified(server: Server) -> int:
    """Have `verify` look at everything; returns how many rows it found clean."""
    with _contents(server) as contents:
        report = verify(contents)
    assert report.clean, f"{report.findings}\n{server.last_lines()}"
    return report.rows


def _contents(server: Server) -> Any:
    return open_contents(None if server.database else server.data, server.database)


def _expect(status: int, answer: tuple[int, Any]) -> Any:
    assert answer[0] == status, answer
    return answer[1]
