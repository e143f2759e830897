"""A journal with entries of every kind, as a busy service writes it."""

from __future__ import annotations

import random

import msgspec
from tests.control.control_plane import A30, A100, ControlPlane

from slicewise.control.answers import Answer
from slicewise.control.commands import (
    CarryOut,
    Cordon,
    Drain,
    IssueToken,
    MoveInstance,
    RemoveNode,
    RevokeToken,
    Uncordon,
)
from slicewise.control.ports import IdempotencyKey, Kept
from slicewise.control.snapshot import Snapshot, snapshot_of
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import Role, Seconds
from slicewise.store.sql import SqlStore

START = 1_700_000_000.0
PROFILES = ("1g.10gb", "1g.10gb+me", "2g.20gb", "3g.40gb", "7g.80gb", "1g.6gb", "2g.12gb")


class Busy:
    """A command handler under load, and its answers."""

    def __init__(self, seed: int = 1) -> None:
        self.chance = random.Random(seed)
        self.office = ControlPlane(rules=ReservationRules(after=30.0, share=0.5))
        self.office.now = START
        self.answers: list[tuple[IdempotencyKey, Kept, Seconds]] = []
        self.snapshots: dict[int, Snapshot] = {}
        self._placed: list[str] = []
        self._tokens: list[str] = []
        self._nodes = 0
        self.office.tenant("acme")
        self.office.tenant("blue", instances=12)
        self._add_node(A100)
        self._add_node(A30)

    def work(self, rows: int) -> None:
        """Continue until there are this many rows."""
        while len(self.office.rows) < rows:
            self._something()

    def snapshot(self) -> Snapshot:
        """A snapshot of the state as it is."""
        snapshot = self.snapshots[self.office.state.seq] = snapshot_of(self.office.state)
        return snapshot

    def _something(self) -> None:
        office, chance = self.office, self.chance
        office.now += chance.random() * 20
        what = chance.random()
        if what < 0.45:
            self._create()
        elif what < 0.85 and self._placed:
            office.release(self._placed.pop(chance.randrange(len(self._placed))))
        elif what < 0.88:
            self._turn_a_node()
        elif what < 0.91:
            self._move_one()
        elif what < 0.94 or not self._tokens:
            status, body = office.ask(
                IssueToken(f"digest {office.state.seq}", Role.TENANT, tenant="acme")
            )
            assert status == 201
            self._keep(status, body)
            self._tokens.append(body["id"])
        elif what < 0.96:
            office.ask(RevokeToken(self._tokens.pop()))
        else:
            office.wait(chance.random() * 100)

    def _create(self) -> None:
        chance = self.chance
        terms: dict[str, object] = {}
        if chance.random() < 0.3:
            terms |= {"wait": 200.0, "priority": chance.randrange(3)}
        if chance.random() < 0.2:
            terms["lease"] = 300.0
        if chance.random() < 0.2:
            terms["count"] = 2
        status, body = self.office.create(
            chance.choice(PROFILES), tenant=chance.choice(("acme", "blue")), **terms
        )
        if status == 201:
            self._placed.append(body["id"])
        self._keep(status, body)

    def _keep(self, status: int, body: object) -> None:
        if status in (201, 202, 409):
            key = IdempotencyKey("acme", f"key {len(self.office.rows)} {self.chance.random()}")
            kept = Kept("digest", Answer(status, msgspec.json.encode(body)))
            self.answers.append((key, kept, self.office.now))

    def _add_node(self, model: object) -> None:
        self.office.node(f"n{self._nodes}", gpus=2, geometry=model)
        self._nodes += 1

    def _turn_a_node(self) -> None:
        office, chance = self.office, self.chance
        name = chance.choice(list(office.state.nodes))
        step = chance.randrange(4)
        if step == 0:
            office.ask(Cordon(name))
        elif step == 1:
            office.ask(Uncordon(name))
        elif step == 2:
            office.ask(Drain(name, evict=True))
            office.ask(RemoveNode(name))
            self._add_node(chance.choice((A100, A30)))
        else:
            self._add_node(chance.choice((A100, A30)))

    def _move_one(self) -> None:
        state = self.office.state
        placed = [one for one in state.allocations.values() if one.parts]
        if not placed:
            return
        one = self.chance.choice(placed)
        part = one.parts[0]
        for name, node in state.nodes.items():
            for gpu in range(len(node.gpus)):
                for start in range(node.geometry.slices):
                    move = MoveInstance(
                        one.id, 0, part.node, part.gpu, part.start, name, gpu, start
                    )
                    if self.office.ask(CarryOut((move,)))[0] == 200:
                        return


def fill(store: SqlStore, rows: int = 400, seed: int = 1, snapshots: int = 3) -> Busy:
    """Run a command handler on a store: batches of all sizes, and occasional snapshots."""
    busy = Busy(seed)
    epoch = store.lead("test", "http://127.0.0.1:1", 60)
    assert epoch is not None
    written = given = 0
    while written < rows:
        busy.work(min(rows, written + busy.chance.randrange(1, 40)))
        store.append(epoch, busy.office.rows[written:], busy.answers[given:])
        if (
            len(busy.snapshots) < snapshots
            and len(busy.office.rows) > rows * len(busy.snapshots) // snapshots
        ):
            store.save_snapshot(busy.snapshot())
        written, given = len(busy.office.rows), len(busy.answers)
    store.resign(epoch)
    return busy
