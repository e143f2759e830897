"""`verify` on journals with agents: clean if intact, findings for every kind of damage."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.control.control_plane import A100, ControlPlane
from tests.control.fake_node import FakeNode
from tests.control.test_agents import COLLISION, COLLISION_FOUND, ManagedNode, foreign_report
from tests.control.test_agents_walk import agent_step, command
from tests.store.busy import START
from tests.store.test_verify import Papers

from slicewise.control.allocation_state import AllocationEntries
from slicewise.control.commands import Heard, Lost
from slicewise.control.snapshot import snapshot_of
from slicewise.core.cluster import Cluster
from slicewise.journal.entries import Row, decode
from slicewise.runtime.commit_loop import load
from slicewise.store import open_store, verify
from slicewise.store.sql import SqlStore


def fill(store: SqlStore, seed: int, steps: int = 500) -> None:
    """A journal with agent entries and occasional snapshots."""
    rng = random.Random(seed)
    office = ControlPlane()
    office.now = START
    office.tenant("acme")
    office.node("plain", 1, A100)
    boxes = [FakeNode("b0", ["GPU-a", "GPU-b"], rng), FakeNode("b1", ["GPU-c"], rng)]
    for box in boxes:
        box.hello(office)
    epoch = store.lead("test", "http://127.0.0.1:1", 60)
    assert epoch is not None
    written = 0
    for step in range(steps):
        office.now += rng.choice([0, 1, 5])
        if rng.random() < 0.4:
            office.ask(command(rng, office, boxes))
        else:
            agent_step(rng, office, rng.choice(boxes))
        if step % 50 == 49:
            store.append(epoch, office.rows[written:], [])
            written = len(office.rows)
            if step % 200 == 199:
                store.save_snapshot(snapshot_of(office.state))
    store.append(epoch, office.rows[written:], [])
    store.resign(epoch)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStore]:
    """A store with agent entries of every kind, many of them current at the end."""
    managed = ManagedNode()
    office = managed.control
    office.now = START
    managed.hello()
    used, ended, gone = managed.create(), managed.create(), managed.create()
    for number, one in enumerate((used, ended, gone)):
        managed.phase(one, "creating", attempts=1)
        managed.phase(one, "active", uuid=f"MIG-{number}")
    for one in (ended, gone):
        office.release(one["id"])
    managed.phase(gone, "gone")
    managed.phase(ended, "quarantined", detail="in use", attempts=10)
    found = [{"uuid": "GPU-0", "mig": True}, {"uuid": "GPU-1", "mig": False}]
    managed.report(
        gpus=found, foreign=(foreign_report(gpu="GPU-1"), foreign_report(uuid="MIG-y", profile=""))
    )
    managed.report(gpus=found[:1], foreign=(foreign_report(gpu="GPU-1"),))
    office.ask(Lost("g", managed.session, START))
    office.ask(Heard("g"))
    store = open_store(tmp_path_factory.mktemp("agents"))
    epoch = store.lead("test", "http://127.0.0.1:1", 60)
    assert epoch is not None
    rows = [
        row if row.at >= START else msgspec.structs.replace(row, at=START) for row in office.rows
    ]
    store.append(epoch, rows, [])
    store.save_snapshot(snapshot_of(office.state))
    yield store
    store.close()


@pytest.fixture
def papers(good: SqlStore) -> Papers:
    return Papers(good)


@pytest.mark.parametrize("seed", range(4))
def test_journals_with_agents_are_clean(tmp_path: Path, seed: int) -> None:
    store = open_store(tmp_path)
    fill(store, seed)
    report = verify(store)
    assert report.findings == []
    assert report.snapshots == 2
    assert report.rows > 100
    store.close()


def test_a_journal_that_begins_at_a_snapshot_is_clean(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, seed=5)
    papers = Papers(store)
    assert verify(papers.cut()).findings == []
    store.close()


@pytest.mark.parametrize("told", [0, len(COLLISION_FOUND)])
def test_a_journal_without_holds_for_first_reports_is_clean(tmp_path: Path, told: int) -> None:
    """Clean before and after the service continues it."""
    store = open_store(tmp_path)
    epoch = store.lead("test", "http://127.0.0.1:1", 60)
    assert epoch is not None
    journal = COLLISION + COLLISION_FOUND[:told]
    rows = [Row(seq, START, "t", decode(data)) for seq, data in enumerate(journal, 1)]
    store.append(epoch, rows, [])
    assert verify(store).findings == []
    managed = ManagedNode.__new__(ManagedNode)
    managed.control, managed.session, managed.gpus = ControlPlane(), "s1.1000.", ("GPU-0",)
    managed.control = ControlPlane(state=load(store, managed.control.fresh()), first_id=1000)
    managed.control.now = START
    failed = {"allocation": "a1", "index": 0, "phase": "failed", "detail": "taken"}
    managed.report(failed, foreign=(foreign_report(),))
    managed.hello(reports=False)
    waits = managed.create("1g.18gb", wait=100.0)
    assert waits["state"] == "queued"
    managed.report({"allocation": "a1", "index": 0, "phase": "gone"}, foreign=(foreign_report(),))
    assert managed.state.allocations[waits["id"]].state == "placed"
    store.append(epoch, managed.control.rows, [])
    store.save_snapshot(snapshot_of(managed.state))
    report = verify(store)
    assert report.findings == []
    assert report.snapshots == 1
    store.close()


def test_the_undamaged_journal_is_clean(papers: Papers) -> None:
    report = verify(papers)
    assert report.findings == []
    assert report.snapshots == 1


def of_phase(*phases: str) -> Callable[[Any], bool]:
    return lambda entry: entry["phase"] in phases


def blocks(entry: Any) -> bool:
    return bool(entry["foreign"].get("blocks"))


DAMAGE: dict[str, tuple[Callable[[Papers], object], str]] = {
    "something is gone that was not to go": (
        lambda p: p.change(
            p.first("part-turned", of_phase("creating", "active")), lambda e: e.update(phase="gone")
        ),
        "and is gone",
    ),
    "something is active that was to go": (
        lambda p: p.change(
            p.first("part-turned", of_phase("gone")), lambda e: e.update(phase="active")
        ),
        "and is active",
    ),
    "something is gone that is not there": (
        lambda p: p.change(
            p.first("part-turned", of_phase("gone")), lambda e: e.update(allocation="a-unknown")
        ),
        "is gone and is not there",
    ),
    "an instance is placed as if there were no agent": (
        lambda p: p.change(
            p.first("allocated", lambda e: "phase" in e["allocation"]["parts"][0]),
            lambda e: e["allocation"]["parts"][0].pop("phase"),
        ),
        "is just there",
    ),
    "a foreign_report where no profile may be": (
        lambda p: p.change(p.first("foreign-seen", blocks), lambda e: e["foreign"].update(start=7)),
        "does not allow it",
    ),
    "a foreign_report of another size": (
        lambda p: p.change(p.first("foreign-seen", blocks), lambda e: e["foreign"].update(size=9)),
        "not as large as its profile",
    ),
    "an agent of no node": (
        lambda p: p.change(p.first("agent-joined"), lambda e: e.update(node="nowhere")),
        "has an agent and is not there",
    ),
    "a snapshot in which nothing is leaving": (
        lambda p: p.change_snapshot(lambda i: i.update(leaving=[])),
        "has other leaving than the journal",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(papers: Papers, damage: str) -> None:
    tamper, expected = DAMAGE[damage]
    tamper(papers)
    findings = verify(papers).findings
    assert any(expected in finding for finding in findings), findings


@pytest.mark.parametrize(
    ("method", "finding"),
    [
        (
            "set_part",
            "ends as something else|other instances in the state|which instances are leaving",
        ),
        ("hold", "is scheduled wrongly"),
        ("unhold", "is scheduled wrongly"),
    ],
)
def test_a_wrong_count_in_the_state_is_found(
    papers: Papers, monkeypatch: pytest.MonkeyPatch, method: str, finding: str
) -> None:
    if method == "set_part":
        monkeypatch.setattr(AllocationEntries, "set_part", lambda *_: None)
    else:
        monkeypatch.setattr(Cluster, method, lambda *_: None)
    findings = verify(papers).findings
    assert any(part in one for one in findings for part in finding.split("|")), findings
