"""`verify` knows what agents did: clean where they did it right, and found out where not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.control.box import Box
from tests.control.office import A100, Office
from tests.control.test_agents import BEFORE_REPORTS, FOUND_LATER, Site, stranger
from tests.control.test_agents_walk import agent_step, command
from tests.store.busy import START
from tests.store.test_verify import Papers

from slicewise.control.commands import Heard, Lost
from slicewise.control.entries import Row, decode
from slicewise.control.image import image_of
from slicewise.control.state import State
from slicewise.control.writer import load
from slicewise.core.cluster import Cluster
from slicewise.store import open_store, verify
from slicewise.store.sql import SqlStore


def fill(store: SqlStore, seed: int, steps: int = 500) -> None:
    """A journal that agents have a part in, with an image now and then."""
    rng = random.Random(seed)
    office = Office()
    office.now = START
    office.tenant("acme")
    office.node("plain", 1, A100)
    boxes = [Box("b0", ["GPU-a", "GPU-b"], rng), Box("b1", ["GPU-c"], rng)]
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
                store.keep_image(image_of(office.state))
    store.append(epoch, office.rows[written:], [])
    store.resign(epoch)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStore]:
    """A store with something of everything that agents do, much of it still there at the end."""
    site = Site()
    office = site.office
    office.now = START
    site.hello()
    used, ended, gone = site.create(), site.create(), site.create()
    for number, one in enumerate((used, ended, gone)):
        site.phase(one, "creating", attempts=1)
        site.phase(one, "active", uuid=f"MIG-{number}")
    for one in (ended, gone):
        office.release(one["id"])
    site.phase(gone, "gone")
    site.phase(ended, "quarantined", detail="in use", attempts=10)
    found = [{"uuid": "GPU-0", "mig": True}, {"uuid": "GPU-1", "mig": False}]
    site.report(gpus=found, foreign=(stranger(gpu="GPU-1"), stranger(uuid="MIG-y", profile="")))
    site.report(gpus=found[:1], foreign=(stranger(gpu="GPU-1"),))
    office.ask(Lost("g", site.session, START))
    office.ask(Heard("g"))
    store = open_store(tmp_path_factory.mktemp("agents"))
    epoch = store.lead("test", "http://127.0.0.1:1", 60)
    assert epoch is not None
    rows = [
        row if row.at >= START else msgspec.structs.replace(row, at=START) for row in office.rows
    ]
    store.append(epoch, rows, [])
    store.keep_image(image_of(office.state))
    yield store
    store.close()


@pytest.fixture
def papers(good: SqlStore) -> Papers:
    return Papers(good)


@pytest.mark.parametrize("seed", range(4))
def test_what_agents_did_is_clean(tmp_path: Path, seed: int) -> None:
    store = open_store(tmp_path)
    fill(store, seed)
    report = verify(store)
    assert report.findings == []
    assert report.images == 2
    assert report.rows > 100
    store.close()


def test_a_journal_that_begins_at_an_image_is_clean(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, seed=5)
    papers = Papers(store)
    assert verify(papers.cut()).findings == []
    store.close()


@pytest.mark.parametrize("told", [0, len(FOUND_LATER)])
def test_a_journal_from_before_first_reports_were_waited_for_is_clean(
    tmp_path: Path, told: int
) -> None:
    """It is clean as it is, and when the service goes on with it."""
    store = open_store(tmp_path)
    epoch = store.lead("test", "http://127.0.0.1:1", 60)
    assert epoch is not None
    journal = BEFORE_REPORTS + FOUND_LATER[:told]
    rows = [Row(seq, START, "t", decode(data)) for seq, data in enumerate(journal, 1)]
    store.append(epoch, rows, [])
    assert verify(store).findings == []
    site = Site.__new__(Site)
    site.office, site.session, site.gpus = Office(), "s1.1000.", ("GPU-0",)
    site.office = Office(state=load(store, site.office.fresh()), first_id=1000)
    site.office.now = START
    failed = {"allocation": "a1", "index": 0, "phase": "failed", "detail": "taken"}
    site.report(failed, foreign=(stranger(),))
    site.hello(reports=False)
    waits = site.create("1g.18gb", wait=100.0)
    assert waits["state"] == "queued"
    site.report({"allocation": "a1", "index": 0, "phase": "gone"}, foreign=(stranger(),))
    assert site.state.allocations[waits["id"]].state == "placed"
    store.append(epoch, site.office.rows, [])
    store.keep_image(image_of(site.state))
    report = verify(store)
    assert report.findings == []
    assert report.images == 1
    store.close()


def test_the_good_one_is_clean(papers: Papers) -> None:
    report = verify(papers)
    assert report.findings == []
    assert report.images == 1


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
            p.first("part-turned", of_phase("gone")), lambda e: e.update(allocation="a-nobody")
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
    "a stranger where no profile may be": (
        lambda p: p.change(p.first("foreign-seen", blocks), lambda e: e["foreign"].update(start=7)),
        "does not allow it",
    ),
    "a stranger of another size": (
        lambda p: p.change(p.first("foreign-seen", blocks), lambda e: e["foreign"].update(size=9)),
        "not as large as its profile",
    ),
    "an agent of no node": (
        lambda p: p.change(p.first("agent-joined"), lambda e: e.update(node="nowhere")),
        "has an agent and is not there",
    ),
    "an image in which nothing is leaving": (
        lambda p: p.change_image(lambda i: i.update(leaving=[])),
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
def test_a_state_that_loses_count_is_found(
    papers: Papers, monkeypatch: pytest.MonkeyPatch, method: str, finding: str
) -> None:
    if method == "set_part":
        monkeypatch.setattr(State, "set_part", lambda *_: None)
    else:
        monkeypatch.setattr(Cluster, method, lambda *_: None)
    findings = verify(papers).findings
    assert any(part in one for one in findings for part in finding.split("|")), findings
