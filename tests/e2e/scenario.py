"""A scenario: tenants, nodes and many clients on one or more servers, and checks of the outcome."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.e2e.call_log import KEYED, CallLog
from tests.e2e.decision_replay import RULES
from tests.e2e.history_checker import Verdict, check
from tests.e2e.load import Behavior, Client, Operator, Pool
from tests.e2e.server import Address, Server
from tests.e2e.state_comparison import compare
from tests.e2e.wire import Wire

from slicewise.control.state import State
from slicewise.journal.entries import Row, decode
from slicewise.store import open_backup, open_contents, verify
from slicewise.store.contents import Contents

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
SETTINGS = (
    f"queue.reserve_after={RULES.after}",
    f"queue.reserve_share={RULES.share}",
    "lease.seconds=0.5",
    "limits.requests_per_second=1000000",
)


@dataclass
class Scenario:
    """A group of clients and the log of their calls."""

    seed: int
    clients: int = 12
    operated: bool = False
    """Whether there is an operator, who cordons nodes and moves instances."""
    policy: str = "default"
    behavior: Behavior = field(default_factory=Behavior)
    servers: list[Server] = field(default_factory=list)
    call_log: CallLog = field(default_factory=CallLog)
    members: list[Client] = field(default_factory=list)
    staff: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._pools = {name: Pool() for name in TENANTS}
        self._created = 0

    def addresses(self) -> Sequence[Address]:
        """Return the current addresses of the servers."""
        return [server.address for server in self.servers]

    # Setup

    def set_up(self, server: Server) -> None:
        """Register tenants and nodes."""
        for name, quota in TENANTS.items():
            _expect(201, server.ask("POST", "/v1/tenants", {"name": name, "quota": quota}))
        for name, model, gpus in NODES:
            body = {"name": name, "model": model, "gpus": gpus}
            _expect(201, server.ask("POST", "/v1/nodes", body))

    def add_clients(self, server: Server) -> None:
        """Replace every client that is gone by a new one with a new token."""
        self.staff.add(_expect(200, server.ask("GET", "/v1/whoami"))["id"])
        self.members = [client for client in self.members if client.alive]
        if self.operated and not any(isinstance(client, Operator) for client in self.members):
            self.members.append(self._new_client(server, None))
        while len(self.members) < self.clients:
            names = list(TENANTS)
            self.members.append(self._new_client(server, names[self._created % len(names)]))

    def _new_client(self, server: Server, tenant: str | None) -> Client:
        """Create a client with its own token; an operator has no tenant."""
        self._created += 1
        kind, role = (Operator, "operator") if tenant is None else (Client, "tenant")
        body = {"role": role} | ({} if tenant is None else {"tenant": tenant})
        token = _expect(201, server.ask("POST", "/v1/tokens", body))
        return kind(
            f"c{self._created}",
            token["id"],
            token["token"],
            tenant or "",
            self.call_log,
            self._pools.get(tenant or "", Pool()),
            self.addresses,
            random.Random(self.rng.random()),
            self.behavior,
        )

    # Checks

    def check_state(self, server: Server) -> None:
        """Check that the reported state agrees with the answers; requires no calls in flight."""
        problems, allocations = compare(self.call_log, server)
        assert not problems, self._describe(problems, server)
        for one in allocations:  # other clients can release the allocations of those that are gone
            self._pools[one["tenant"]].add(one["id"])

    async def repeat_calls(self, sample: int) -> int:
        """Repeat answered calls with their keys; return how many gave the same answer."""
        kept = [call for call in self.call_log.calls if call.known and call.kind in KEYED]
        chosen = self.rng.sample(kept, min(sample, len(kept)))
        secrets = {client.actor: client.secret for client in self.members}
        asked = 0
        for call in chosen:
            if call.actor not in secrets:
                continue
            wire = Wire(secrets[call.actor], self.behavior.patience)
            reply = await wire.ask(self.addresses()[0], call.method, call.path, call.body, call.key)
            wire.close()
            asked += 1
            assert (reply.status, reply.body) == (call.status, call.answer), (
                f"call {call.key} first got {call.status} {call.answer!r}, "
                f"then {reply.status} {reply.body!r}"
            )
        return asked

    def check_history(self, server: Server) -> Verdict:
        """Check the history of all calls."""
        verdict = check(journal(server), self.call_log.calls, self.fresh_state, self.staff)
        assert not self.call_log.unexpected, self._describe(self.call_log.unexpected, server)
        assert verdict.clean, self._describe(verdict.problems, server)
        return verdict

    def fresh_state(self) -> State:
        """Return the empty state of a service with these settings."""
        return State(self.policy)

    def _describe(self, problems: Sequence[str], server: Server) -> str:
        lines = "\n".join(problems[:20])
        return f"seed {self.seed}, {len(problems)} problems:\n{lines}\n{server.last_lines()}"


async def run_clients(scenario: Scenario, halt: asyncio.Event) -> None:
    """Run all clients until ``halt`` is set; each completes its last call."""
    await asyncio.gather(*(client.run(halt) for client in scenario.members))


def journal(server: Server) -> list[Row]:
    """Return the whole journal of a server, which may be running."""
    with _contents(server) as contents:
        list(contents.snapshots())
        list(contents.answers())
        return [
            Row(row.seq, row.at, row.actor, decode(row.data), row.origin) for row in contents.rows()
        ]


def verified(server: Server) -> int:
    """Run `verify` and return the number of rows, all of which must be clean."""
    with _contents(server) as contents:
        report = verify(contents)
    assert report.clean, f"{report.findings}\n{server.last_lines()}"
    return report.rows


@contextmanager
def _contents(server: Server) -> Iterator[Contents]:
    if server.database or not server.runs:
        with open_contents(None if server.database else server.data, server.database) as contents:
            yield contents
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "backup"
        server.backup(file)
        with open_backup(file) as contents:
            yield contents


def _expect(status: int, answer: tuple[int, Any]) -> Any:
    assert answer[0] == status, answer
    return answer[1]
