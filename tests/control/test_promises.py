"""Waiting in the service, whatever happens: moves, drains, extensions, quotas, reclaim (I1, I4-I6).

The same invariants as in `tests/engine/test_fair_queue.py`, with all commands of the service.
"""

from __future__ import annotations

import os
import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from scripts.check_waiting import check
from tests.control.control_plane import A30, ControlPlane
from tests.control.test_restart import RECLAIM, random_command, start_cluster

from slicewise.control.commands import (
    CarryOut,
    Command,
    Cordon,
    Create,
    CreateAll,
    Extend,
    MoveInstance,
    Terms,
    Uncordon,
)
from slicewise.control.quota import QuotaCheck
from slicewise.control.snapshot import restore_snapshot, snapshot_of
from slicewise.control.state import State
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.engine.reservations import LineKey, Window
from slicewise.journal.entries import Ended, Reserved, Row, Served, Want

EXAMPLES = int(os.environ.get("SLICEWISE_QUEUE_EXAMPLES", "20"))
"""Random streams; more of them in `make soak`."""
RULES = (ReservationRules(after=2.0, share=0.5), ReservationRules(after=0.0, share=1.0))


class Kept(NamedTuple):
    """A window as it was before a command."""

    opens: float | None
    claimed: bool
    blockers: frozenset[int]


Windows = dict[tuple[LineKey, int, int], Kept]


def aimed_command(rng: random.Random, state: State, step: int) -> Command:
    """A command that is likely to concern reserved windows, or any other."""
    dice = rng.random()
    placed = [record for record in state.allocations.values() if record.parts]
    reserved = [window for _, pool in state.reservations for window in pool]
    if dice < 0.1 and placed and reserved:
        gpu = rng.choice(reserved).gpu
        node, record = state.cluster.node_of(gpu), rng.choice(placed)
        at = record.parts[0]
        to = (node.name, gpu - node.gpus.start, rng.choice([0, 1, 2, 4]))
        return CarryOut((MoveInstance(record.id, 0, at.node, at.gpu, at.start, *to),))
    if dice < 0.3:
        terms = Terms(
            Want(profile=rng.choice(["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"])),
            count=rng.choice([1, 1, 2]),
            priority=rng.choice([0, 1]),
            wait=rng.choice([20, 60]),
            lease=rng.choice([2, 5, 10, 20]),
            preemptible=rng.random() < 0.4,
        )
        return Create(rng.choice(["acme", "beta"]), terms)
    if dice < 0.4 and placed:
        return Extend(rng.choice(placed).id, rng.choice([2, 10, 30]))
    command = random_command(rng, state, step)
    # The check of refusals cannot tell what a batch had placed before it was refused.
    return Cordon("n9") if isinstance(command, CreateAll) else command


def check_windows(state: State, before: Windows, rows: list[Row]) -> Windows:
    """Check the reserved windows after a command, and return them."""
    ends = QuotaCheck(state).ends
    # Where a holder was served or gave up, the next of the line has the windows. Where a line lost
    # its windows, as when a node is drained, it may get others.
    changed = {
        (row.entry.allocation.tenant if isinstance(row.entry, Ended) else row.entry.tenant).id
        for row in rows
        if isinstance(row.entry, Ended | Served)
        or (isinstance(row.entry, Reserved) and not row.entry.windows)
    }
    after: Windows = {}
    gpus: set[int] = set()
    for line, pool in state.reservations:
        waiting = state.waiting.line(line)
        assert waiting is not None
        assert len(pool) <= (len(waiting) - waiting.held) * line.instances
        for window in pool:
            assert window.gpu not in gpus
            gpus.add(window.gpu)
            blockers = state.reservations.blockers(window)
            if window.opens is not None:
                times = [ends(one) for one in blockers]
                assert all(end is not None and end <= window.opens for end in times)
            ids = frozenset(one.id for one in blockers)
            after[line, window.gpu, window.placement] = Kept(window.opens, window.claimed, ids)
    for key, now in after.items():
        was = before.get(key)
        if was is None or key[0].tenant in changed:
            continue
        if was.opens is not None and not (was.claimed or now.claimed):
            assert now.opens is not None
            assert now.opens <= was.opens
        if now.opens is None:
            assert now.blockers <= was.blockers
    return after


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=EXAMPLES)
def test_promises_hold_and_no_window_stays_open(seed: int) -> None:
    rng = random.Random(seed)
    rules, warning = rng.choice(RULES), rng.choice([0, 2])
    control = ControlPlane(rules=rules, reclaim=rng.choice(RECLAIM), lease_warning=warning)
    start_cluster(control)
    windows: Windows = {}
    for step in range(80):
        control.now += rng.choice([0, 0, 1, 4])
        written = len(control.rows)
        control.ask(aimed_command(rng, control.state, step))
        windows = check_windows(control.state, windows, control.rows[written:])
    seen, wrong = check(control.rows)
    assert wrong == []
    assert seen["entries"] == len(control.rows)


def test_old_plans_respect_reserved_windows() -> None:
    control = ControlPlane(rules=ReservationRules(after=0.0))
    control.tenant()
    control.node("n0", 1)
    _, short = control.create("1g.10gb", lease=50.0)
    control.ask(Cordon("n0"))
    control.node("n1", 1)
    _, endless = control.create("3g.40gb")
    control.ask(Uncordon("n0"))
    _, waits = control.create("7g.80gb", wait=100)
    control.wait(1)
    control.create("1g.10gb", lease=5.0)  # it overtakes

    def window() -> Window:
        ((_, (found,)),) = control.state.reservations
        return found

    assert control.state.cluster.node_of(window().gpu).name == "n0"
    assert window().opens == 1050.0
    into = MoveInstance(endless["id"], 0, "n1", 0, endless["start"], "n0", 0, 0)
    status, said = control.ask(CarryOut((into,)))
    assert (status, said["reason"]) == (409, "stale")
    assert "a window of GPU 0 of 'n0' is reserved for a queued request" in said["detail"]
    # A move out of it lets it open earlier: here at once, or when the other instance has ended.
    start = next(s for s in (0, 1, 2, 3, 4, 5) if not 0 <= s - endless["start"] < 4)
    out = MoveInstance(short["id"], 0, "n0", 0, short["start"], "n1", 0, start)
    assert control.ask(CarryOut((out,)))[0] == 200
    if waits["id"] in control.state.tickets:
        assert window().opens == 1006.0
        control.wait(5)
    assert waits["id"] not in control.state.tickets


def test_a_new_model_may_split_a_line_with_reserved_windows() -> None:
    control = ControlPlane(rules=ReservationRules(after=0.0, share=1.0))
    control.tenant()
    control.tenant("beta")
    control.node("n0", 5)
    for lease in (50.0, 60.0, 70.0, 80.0):
        control.create("7g.80gb", lease=lease)
    for profile in ("4g.40gb", "2g.20gb"):
        control.create(profile, lease=90.0)
    # Until there is a profile with 24 GB, both needs take 40 GB, and their requests are one line.
    asked = []
    for memory in (30.0, 21.0):
        terms = Terms(Want(compute=1, memory_gb=memory), wait=100)
        asked.append(control.ask(Create("beta", terms))[1]["id"])
    control.wait(1)
    control.create("1g.10gb")  # it overtakes
    ((_, pool),) = control.state.reservations
    assert [window.opens for window in pool] == [1050.0, 1060.0]
    control.node("n1", 1, A30)
    placed = control.state.allocations[asked[1]].parts
    assert [(part.node, part.profile) for part in placed] == [("n1", "4g.24gb")]
    ((line, (window,)),) = control.state.reservations
    assert control.state.waiting.line(line) is not None
    assert window.opens == 1050.0
    restored = restore_snapshot(snapshot_of(control.state), control.fresh())
    assert list(restored.reservations) == list(control.state.reservations)
    assert list(restored.waiting) == list(control.state.waiting)
    control.wait(49)
    assert control.state.allocations[asked[0]].parts
