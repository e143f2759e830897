"""A dry run and a request at the same entry of the journal are told the same (I8)."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.control.control_plane import ControlPlane
from tests.control.test_restart import random_command, start_cluster

from slicewise.control.allocations import as_ticket
from slicewise.control.commands import Create, Terms
from slicewise.control.feasibility import as_capacity
from slicewise.control.quota import too_long, with_lease
from slicewise.control.state import State
from slicewise.control.waiting import Waiting
from slicewise.core.request import Reason, Rejection
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import Want


def predicted(state: State, tenant: str, terms: Terms, now: float) -> Any:
    """Decide without placing anything, as a dry run does."""
    waiting, status = Waiting(state), state.tenants_by_name[tenant]
    terms = with_lease(terms, status)
    if too_long(status, terms.lease) is not None:
        return Reason.QUOTA
    ticket = as_ticket(state, status.ref, terms, now)
    turn = state.scheduler.turn
    outcome = waiting.dispatcher.place(ticket, now)
    state.scheduler.turn = turn
    if isinstance(outcome, Rejection):
        return as_capacity(outcome).reason
    refusal, parts = waiting.quota_check.excess(ticket, outcome), state.parts(outcome)
    for instance in reversed(outcome):
        state.cluster.undo_place(instance)
    return refusal.reason if refusal is not None else [(p.node, p.gpu, p.start) for p in parts]


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=30)
def test_a_dry_run_on_a_replica_tells_what_a_request_would_get(seed: int) -> None:
    rng = random.Random(seed)
    control = ControlPlane(rules=ReservationRules(after=2.0, share=0.5))
    start_cluster(control)
    for step in range(60):
        control.now += rng.choice([0, 1, 4])
        control.ask(random_command(rng, control.state, step))
    replica = control.fresh()
    for row in control.rows:
        replica.apply(row)
    for _ in range(30):
        profile = rng.choice(["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "1g.6gb"])
        terms = Terms(
            Want(profile=profile), rng.choice([1, 1, 2]), lease=rng.choice([None, 1.0, 9.0])
        )
        tenant = rng.choice(["acme", "beta"])
        if tenant not in control.state.tenants_by_name:
            continue
        control.now += rng.choice([0, 0.5])
        for row in control.wait(0):
            replica.apply(row)
        told = predicted(replica, tenant, terms, control.now)
        answer = control.handler.decide(Create(tenant, terms), control.actor, control.now)
        body = msgspec.json.decode(answer.body)
        if answer.status == 201:
            assert told == [(p["node"], p["gpu"], p["start"]) for p in body["instances"]]
        else:
            assert told == body["reason"]
        control.handler.serve_queue(control.now)
        for row in control.take_rows():
            replica.apply(row)
