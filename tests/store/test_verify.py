"""`verify`: no findings in an intact store, and a finding for every kind of damage."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.control_plane import A30, A100, ControlPlane
from tests.store.busy import START, fill
from tests.tenants import ref

from slicewise.control.allocation_state import AllocationEntries
from slicewise.control.snapshot import snapshot_of
from slicewise.control.state import State
from slicewise.core.errors import SlicewiseError
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    Ended,
    ModelEntered,
    Moved,
    NodeAdded,
    NodeRemoved,
    Part,
    Row,
    TenantSet,
    Want,
)
from slicewise.store import open_store, verify
from slicewise.store.checksums import checksum, link
from slicewise.store.contents import JournalHead, StoredAnswer, StoredRow, StoredSnapshot
from slicewise.store.occupancy import Occupancy
from slicewise.store.sql import SqlStore
from slicewise.store.sqlite import DATABASE
from slicewise.store.verification import MAX_FINDINGS


class Papers:
    """The contents of a store as lists that a test can change."""

    def __init__(self, store: SqlStore) -> None:
        contents = store.contents()
        self.last_seq = contents.last_seq
        self.epoch = contents.epoch
        self.head = contents.head
        self.kept_snapshots = list(contents.snapshots())
        self.kept_answers = list(contents.answers())
        self.kept_rows = list(contents.rows())

    def damage(self) -> list[str]:
        return []

    def snapshots(self) -> Iterator[StoredSnapshot]:
        return iter(self.kept_snapshots)

    def answers(self) -> Iterator[StoredAnswer]:
        return iter(self.kept_answers)

    def rows(self) -> Iterator[StoredRow]:
        return iter(self.kept_rows)

    # Tampering

    def first(self, kind: str, having: Callable[[Any], bool] = bool) -> int:
        """The index of the first matching row of a kind."""
        return next(
            index
            for index, row in enumerate(self.kept_rows)
            if (entry := json.loads(row.data))["kind"] == kind and having(entry)
        )

    def change(self, index: int, change: Callable[[Any], object]) -> None:
        """Change the entry of a row in place."""
        row = self.kept_rows[index]
        entry = json.loads(row.data)
        change(entry)
        self.kept_rows[index] = row._replace(data=json.dumps(entry), filed=None)

    def stamp(self, index: int, **stamps: Any) -> Papers:
        """Change the columns of a row besides its entry."""
        self.kept_rows[index] = self.kept_rows[index]._replace(**stamps)
        return self

    def lead_until(self, epoch: int) -> None:
        self.epoch = epoch

    def change_snapshot(self, change: Callable[[Any], object]) -> None:
        snapshot = self.kept_snapshots[0]
        data = json.loads(snapshot.data)
        change(data)
        self.kept_snapshots[0] = snapshot._replace(data=json.dumps(data))

    def cut(self) -> Papers:
        """Remove the rows before the oldest snapshot."""
        snapshot = self.kept_snapshots[0]
        self.kept_rows = self.kept_rows[snapshot.seq :]
        fields = (self.head.history, self.head.former, snapshot.seq, snapshot.chain)
        self.head = JournalHead(*fields, checksum(*fields), self.head.seq, self.head.chain)
        return self

    def seal(self) -> None:
        """Recompute every checksum, as a defect of the service would."""
        chain, chains = self.head.base_chain, {self.head.base: self.head.base_chain}
        for index, row in enumerate(self.kept_rows):
            chain = chains[row.seq] = link(chain, *row[:-2])
            self.kept_rows[index] = row._replace(chain=chain)
        self.head = self.head._replace(chain=chain)
        for index, snapshot in enumerate(self.kept_snapshots):
            chain = chains.get(snapshot.seq, b"")
            seal = checksum(snapshot.seq, snapshot.data.encode(), chain)
            self.kept_snapshots[index] = snapshot._replace(chain=chain, checksum=seal)
        for index, answer in enumerate(self.kept_answers):
            *_, at, seq, _ = answer
            seal = checksum(*answer[:4], answer.body.encode(), at, seq)
            self.kept_answers[index] = answer._replace(checksum=seal)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlStore]:
    """A store with entries of every kind."""
    store = open_store(tmp_path_factory.mktemp("good"))
    fill(store, 600, seed=5)
    yield store
    store.close()


@pytest.fixture
def papers(good: SqlStore) -> Papers:
    return Papers(good)


def test_an_intact_store_is_clean(good: SqlStore, papers: Papers) -> None:
    report = verify(good)
    assert report.clean
    assert report.findings == []
    assert (report.rows, report.snapshots) == (600, 2)
    assert report.answers == len(papers.kept_answers) > 100
    kinds = {json.loads(row.data)["kind"] for row in papers.kept_rows}
    assert kinds >= {"moved", "served", "node-removed", "token-revoked", "rejected", "reserved"}


def test_an_empty_store_is_clean(store: SqlStore) -> None:
    assert verify(store).findings == []


@pytest.mark.parametrize("seed", range(6))
def test_many_intact_stores_are_clean(tmp_path: Path, seed: int) -> None:
    store = open_store(tmp_path)
    fill(store, 300, seed=seed, snapshots=20)
    assert verify(store).findings == []
    store.close()


def test_a_gpu_that_a_reservation_keeps_from_all_others_is_clean(store: SqlStore) -> None:
    office = ControlPlane(rules=ReservationRules(after=60))
    office.now = START
    office.tenant()
    office.tenant("other")
    office.node()
    office.create("4g.40gb", tenant="other", lease=100)
    office.create("2g.20gb", tenant="other")
    assert office.create("3g.40gb", wait=1000)[0] == 202
    office.now += 1
    assert office.create("1g.10gb", tenant="other")[0] == 201, "it overtakes"
    office.wait(60)
    # 3g in place of 4g leaves more compute slices than there are today: requests must not see it.
    assert not len(office.state.cluster.schedulable)
    epoch = store.lead("test", "http://127.0.0.1:1", 60)
    assert epoch is not None
    store.append(epoch, office.rows, [])
    assert verify(store).findings == []


def test_a_journal_that_begins_at_a_snapshot_is_clean(papers: Papers) -> None:
    papers.cut()
    assert verify(papers).findings == []


def swap_place(papers: Papers) -> None:
    """Place an instance on top of another one."""
    taken: dict[str, list[dict[str, Any]]] = {}
    for index, row in enumerate(papers.kept_rows):
        entry = json.loads(row.data)
        if entry["kind"] == "ended":
            taken.pop(entry["allocation"]["id"], None)
        if entry["kind"] == "allocated":
            parts = entry["allocation"]["parts"]
            for other in taken.values():
                place = {"node": other[0]["node"], "gpu": other[0]["gpu"], "start": 0}
                if other[0]["start"] == 0 and other[0]["model"] == parts[0]["model"]:
                    parts[0].update(place)
                    papers.stamp(index, data=json.dumps(entry), filed=None)
                    return
            taken[entry["allocation"]["id"]] = parts
    raise AssertionError


def create_twice(papers: Papers) -> None:
    """Repeat an allocation in the next row."""
    index = papers.first("allocated")
    papers.stamp(index + 1, data=papers.kept_rows[index].data, filed=None)


def one_part(entry: Any) -> bool:
    return len(entry["allocation"]["parts"]) == 1


DAMAGE: dict[str, tuple[Callable[[Papers], object], str]] = {
    "a row is missing": (lambda p: p.kept_rows.pop(99), "jumps from entry 99 to 101"),
    "the last row is missing": (
        lambda p: p.kept_rows.pop(),
        "ends at entry 599, and should end at entry 600",
    ),
    "the first row is missing": (
        lambda p: p.kept_rows.pop(0),
        "starts at entry 2 instead of 1",
    ),
    "a row stands twice": (
        lambda p: p.kept_rows.insert(50, p.kept_rows[50]),
        "jumps from entry 51 to 51",
    ),
    "an epoch decreases": (
        lambda p: p.stamp(10, epoch=2).lead_until(5),
        "entry 12 was written in epoch 1, after entries of epoch 2",
    ),
    "an epoch without a leader": (
        lambda p: p.stamp(599, epoch=7),
        "written in epoch 7, and the last epoch is 1",
    ),
    "no epoch": (lambda p: p.stamp(0, epoch=0), "entry 1 was written in epoch 0"),
    "time stands still at zero": (lambda p: p.stamp(20, at=0.0), "impossible time, 0.0"),
    "time is not a number": (lambda p: p.stamp(20, at=float("nan")), "impossible time, nan"),
    "time is far ahead": (lambda p: p.stamp(20, at=9e9), "impossible time, 9000000000.0"),
    "time runs backwards": (
        lambda p: p.stamp(20, at=START - 10_000),
        "seconds before the previous entry",
    ),
    "time runs backwards by a moment": (
        lambda p: p.stamp(20, at=START - 1),
        "and no entry records a change of the clock",
    ),
    "an entry is not JSON": (lambda p: p.stamp(30, data="{"), "entry 31 cannot be read"),
    "an entry of no known kind": (
        lambda p: p.change(30, lambda e: e.update(kind="magic")),
        "entry 31 cannot be read",
    ),
    "an entry filed under another tenant": (
        lambda p: p.stamp(40, filed=("allocated", "another", "a1")),
        "entry 41 is filed under",
    ),
    "two instances overlap": (swap_place, "overlaps"),
    "an instance at an illegal start": (
        lambda p: p.change(
            p.first("allocated", one_part), lambda e: e["allocation"]["parts"][0].update(start=5.0)
        ),
        "cannot be read|does not allow it",
    ),
    "an instance on a GPU there is not": (
        lambda p: p.change(
            p.first("allocated"), lambda e: e["allocation"]["parts"][0].update(gpu=9)
        ),
        "which does not exist",
    ),
    "an instance on a node there is not": (
        lambda p: p.change(
            p.first("allocated"), lambda e: e["allocation"]["parts"][0].update(node="nowhere")
        ),
        "which does not exist",
    ),
    "an instance of an unknown profile": (
        lambda p: p.change(
            p.first("allocated"), lambda e: e["allocation"]["parts"][0].update(profile="9g.1gb")
        ),
        "does not allow it",
    ),
    "an instance larger than its profile": (
        lambda p: p.change(
            p.first("allocated"), lambda e: e["allocation"]["parts"][0].update(compute=6)
        ),
        "not as large as its profile",
    ),
    "an allocation without instances": (
        lambda p: p.change(p.first("allocated"), lambda e: e["allocation"].pop("parts")),
        "placed without an instance",
    ),
    "an allocation that is created twice": (create_twice, "placed a second time"),
    "an allocation ends that never was": (
        lambda p: p.change(p.first("ended"), lambda e: e["allocation"].update(id="a-unknown")),
        "ends as something else than it was",
    ),
    "an allocation ends as another tenant's": (
        lambda p: p.change(
            p.first("ended", lambda e: e["allocation"]["tenant"]["name"] == "acme"),
            lambda e: e["allocation"].update(tenant={"id": "tenant:2", "name": "blue"}),
        ),
        "ends as something else than it was",
    ),
    "an allocation ends with other instances": (
        lambda p: p.change(
            p.first("ended", lambda e: e["allocation"].get("parts")),
            lambda e: e["allocation"]["parts"][0].update(memory_gb=1),
        ),
        "ends with other instances than it had",
    ),
    "a served request did not wait": (
        lambda p: p.change(p.first("served"), lambda e: e.update(allocation="a-unknown")),
        "cannot be applied",
    ),
    "something moves that is not there": (
        lambda p: p.change(p.first("moved"), lambda e: e.update(index=63)),
        "moves and is not there",
    ),
    "a node joins twice": (
        lambda p: p.change(
            p.first("node-added", lambda e: e["node"] != "n0"), lambda e: e.update(node="n0")
        ),
        "is added but already exists",
    ),
    "a node of an unknown model": (
        lambda p: p.change(p.first("node-added"), lambda e: e.update(model="none")),
        "which is not known",
    ),
    "a node leaves that is not there": (
        lambda p: p.change(p.first("node-removed"), lambda e: e.update(node="nowhere")),
        "leaves and is not there",
    ),
    "a node gets other GPUs": (
        lambda p: p.change(p.first("node-added"), lambda e: e.update(first=7)),
        "the journal says 7",
    ),
    "a snapshot that is not JSON": (
        lambda p: p.kept_snapshots.__setitem__(0, p.kept_snapshots[0]._replace(data="[")),
        "cannot be read",
    ),
    "a snapshot of another moment": (
        lambda p: p.change_snapshot(lambda i: i.update(seq=1)),
        "says that it is of entry 1",
    ),
    "a snapshot with another quota": (
        lambda p: p.change_snapshot(lambda i: i["tenants"][1]["quota"].update(instances=99)),
        "has other tenants than the journal",
    ),
    "a snapshot without an allocation": (
        lambda p: p.change_snapshot(lambda i: i["allocations"].pop()),
        "has other allocations than the journal",
    ),
    "a snapshot that cannot be restored": (
        lambda p: p.change_snapshot(lambda i: i["allocations"].append(i["allocations"][0])),
        "cannot be restored",
    ),
    "a snapshot in front of which the journal is gone, and wrong": (
        lambda p: p.cut().change_snapshot(lambda i: i["allocations"].append(i["allocations"][0])),
        "cannot be restored",
    ),
    "a snapshot ahead of the journal": (
        lambda p: p.kept_snapshots.append(p.kept_snapshots[0]._replace(seq=9999)),
        "ahead of the journal",
    ),
    "a snapshot whose waiting are in another order": (
        lambda p: p.change_snapshot(lambda i: i.update(last_ticket=9999)),
        "has other last_ticket than the journal",
    ),
    "an answer with an unknown allocation": (
        lambda p: p.kept_answers.append(
            StoredAnswer("acme", "k", "d", 201, '{"id":"a-unknown"}', START, 600, b"")
        ),
        "contains a-unknown, which is not in the journal",
    ),
    "a batch answer with an unknown allocation": (
        lambda p: p.kept_answers.append(
            StoredAnswer("acme", "k", "d", 201, '{"allocations":[{"id":"a-no"}]}', START, 600, b"")
        ),
        "contains a-no,",
    ),
    "an answer that came too early": (
        lambda p: p.kept_answers.append(
            StoredAnswer(
                *("acme", "k", "d", 201),
                json.dumps(json.loads(p.kept_rows[p.first("allocated")].data)["allocation"]),
                *(START, 1, b""),
            )
        ),
        "was given before entry",
    ),
    "an answer that came too late": (
        lambda p: p.kept_answers.append(StoredAnswer("acme", "k", "d", 409, "{}", START, 999, b"")),
        "given after entry 999, which does not exist",
    ),
    "an answer that is not JSON": (
        lambda p: p.kept_answers.append(StoredAnswer("acme", "k", "d", 201, "{", START, 600, b"")),
        "is not JSON",
    ),
    "an answer without a status": (
        lambda p: p.kept_answers.append(StoredAnswer("acme", "k", "d", 0, "[]", START, 600, b"")),
        "has the status 0",
    ),
    "an answer at no time": (
        lambda p: p.kept_answers.append(StoredAnswer("acme", "k", "d", 202, "[]", -1, 600, b"")),
        "at an impossible time",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(papers: Papers, damage: str) -> None:
    tamper, expected = DAMAGE[damage]
    tamper(papers)
    assert not verify(papers).clean
    papers.seal()  # even if no checksum detects it
    report = verify(papers)
    assert any(part in finding for finding in report.findings for part in expected.split("|")), (
        report.findings
    )


def test_the_number_of_findings_is_limited(papers: Papers) -> None:
    for index in range(600):
        papers.stamp(index, at=0.0, epoch=99)
    report = verify(papers)
    assert len(report.findings) == MAX_FINDINGS
    assert report.more >= 600 * 2 - MAX_FINDINGS


def test_wrong_usage_in_the_state_is_found(papers: Papers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usage is computed without the state."""
    charge = AllocationEntries._charge

    def miscount(self: AllocationEntries, record: Any, part: Part, sign: int) -> None:
        charge(self, record, part, sign)
        self._tenant(record).usage.memory_slices += sign
        self._state.nodes[part.node].instances += sign

    monkeypatch.setattr(AllocationEntries, "_charge", miscount)
    findings = verify(papers).findings
    assert any("tenant 'acme' holds" in finding for finding in findings)
    assert any("instances, and the state differs" in finding for finding in findings)


def test_a_placed_allocation_in_the_queue_is_found(
    papers: Papers, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = AllocationEntries._served

    def forget(self: AllocationEntries, entry: Any, row: Row) -> None:
        tickets = self._state.tickets
        number = tickets[entry.allocation]
        served(self, entry, row)
        tickets[entry.allocation] = number

    monkeypatch.setattr(AllocationEntries, "_served", forget)
    del papers.kept_rows[papers.first("served") + 1 :]
    papers.last_seq = papers.kept_rows[-1].seq
    papers.kept_answers.clear()
    papers.kept_snapshots.clear()
    findings = verify(papers).findings
    assert any("waits though it is placed" in finding for finding in findings)
    assert any("is not in the queue" in finding for finding in findings)


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 600)
    store.close()
    file = sqlite3.connect(tmp_path / DATABASE)
    (root,) = file.execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'journal_by_subject'"
    ).fetchone()
    (size,) = file.execute("PRAGMA page_size").fetchone()
    file.close()
    with (tmp_path / DATABASE).open("r+b") as raw:
        raw.seek((root - 1) * size + size // 2)
        raw.write(b"\xff" * (size // 2))
    store = open_store(tmp_path)
    findings = verify(store).findings
    store.close()
    assert findings
    assert all("files are damaged" in finding for finding in findings)


# The slow twin

PARTS = st.builds(
    lambda node, gpu, profile, start: (node, gpu, profile, start),
    st.sampled_from(["n0", "n1"]),
    st.integers(0, 1),
    st.sampled_from([profile.name for profile in (*A100.profiles, *A30.profiles)]),
    st.integers(0, 7),
)


def part(node: str, gpu: int, profile: str, start: int) -> Part:
    model = A100 if node == "n0" else A30
    found = next((p for p in model.profiles if p.name == profile), model.profiles[0])
    return Part(node, gpu, model.model, profile, start, found.size, found.compute, found.memory_gb)


@given(
    st.lists(
        st.tuples(st.sampled_from(["create", "end", "move"]), st.integers(0, 9), PARTS),
        max_size=40,
    )
)
def test_occupancy_reports_exactly_what_the_cluster_refuses(
    steps: list[tuple[str, int, tuple[str, int, str, int]]],
) -> None:
    state, twin = State(), Occupancy()

    def try_out(entry: Any) -> None:
        row = Row(state.seq + 1, START, "", entry)
        before = snapshot_of(state)
        try:
            state.apply(row)
        except SlicewiseError:
            fresh = Occupancy()
            assert fresh.begin_at(before) == []
            assert fresh.take(entry)
            state.seq, living = before.seq, {one.id for one in before.allocations}
            for identity in set(state.allocations) - living:
                del state.allocations[identity]
                del state.tenants["acme"].allocations[identity]
        else:
            assert twin.take(entry) == []

    for entry in (
        TenantSet(ref("acme")),
        ModelEntered(A100),
        ModelEntered(A30),
        NodeAdded("n0", A100.model, 2, 0),
        NodeAdded("n1", A30.model, 2, 2),
    ):
        try_out(entry)
    for number, (what, which, where) in enumerate(steps):
        living = list(state.allocations)
        if what == "create" or not living:
            record = AllocationRecord(
                f"a{number}", ref("acme"), Want(), parts=(part(*where),), placed=0
            )
            try_out(Allocated(record))
            continue
        allocation = state.allocations[living[which % len(living)]]
        if what == "move":
            try_out(Moved(allocation.id, ref("acme"), 0, part(*where)))
        else:
            try_out(Ended(allocation))
    counted = twin.usage().get("acme", (0, 0, 0))
    usage = state.tenants["acme"].usage
    assert counted == (usage.memory_slices, usage.compute_slices, usage.instances)


def test_the_removal_of_a_node_with_instances_is_found() -> None:
    twin = Occupancy()
    for entry in (ModelEntered(A100), NodeAdded("n0", A100.model, 2, 0)):
        assert twin.take(entry) == []
    here = part("n0", 1, "7g.80gb", 0)
    assert twin.take(Allocated(AllocationRecord("a1", ref("acme"), Want(), parts=(here,)))) == []
    assert twin.take(NodeRemoved("n0")) == ["node 'n0' leaves with instances on it"]
    assert twin.instances_by_node() == {}
