"""Verification: replays a store's journal and checks everything else in the store against it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slicewise.control.snapshot import (
    Snapshot,
    decode_snapshot,
    encode_snapshot,
    restore_snapshot,
    snapshot_of,
)
from slicewise.control.state import State
from slicewise.journal.agent_entries import Phase
from slicewise.journal.entries import (
    EARLIEST,
    LATEST,
    Allocated,
    AnyEntry,
    Cause,
    ClockSet,
    Ended,
    NodePhase,
    Queued,
    Row,
    Seconds,
    TenantSet,
    TokenIssued,
    decode,
    index_keys,
)
from slicewise.store.backup_file import Tick, no_tick
from slicewise.store.checksums import checksum, link
from slicewise.store.contents import Contents, StoredAnswer, StoredRow, StoredSnapshot
from slicewise.store.occupancy import HeldResources, Occupancy
from slicewise.store.sql import SqlStore

MAX_FINDINGS = 1000


@dataclass
class VerificationReport:
    """The result of a verification: how much was checked, and the problems that were found."""

    rows: int = 0
    snapshots: int = 0
    answers: int = 0
    findings: list[str] = field(default_factory=list)
    more: int = 0
    """The number of findings beyond the first `MAX_FINDINGS`, which are not listed."""

    @property
    def clean(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def add(self, finding: str) -> None:
        """Add a finding, or only count it once there are `MAX_FINDINGS`."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
        else:
            self.more += 1


def verify(source: SqlStore | Contents, tick: Tick = no_tick) -> VerificationReport:
    """Replay the journal from its beginning and check snapshots, answers and rows against it."""
    report = VerificationReport()
    contents = source.contents() if isinstance(source, SqlStore) else source
    _Inspection(contents, report).run(tick)
    return report


class _Inspection:
    """One pass through the contents of a store."""

    def __init__(self, contents: Contents, report: VerificationReport) -> None:
        self._contents = contents
        self._report = report
        self._add = report.add
        self._snapshots: dict[int, Snapshot] = {}
        self._chains: dict[int, bytes] = {}
        """By sequence number of a snapshot: the digest of its row, as the snapshot records it."""
        self._chain: bytes | None = contents.head.base_chain
        """The digest of the last row; None if the expected digest is unknown."""
        self._promised: dict[str, tuple[int, str]] = {}
        """By id that an answer contains: the last row that may create it, and the answer's name."""
        self._state: State | None = State()
        """The replayed state; None once the replay could not continue."""
        self._begins_at: int | None = None
        """The snapshot at which the replay starts, until that row is reached."""
        self._occupancy = Occupancy()
        self._last: StoredRow | None = None
        self._moved: Seconds = 0
        """By how much the last row set the clock, or 0."""

    def run(self, tick: Tick) -> None:
        contents, report = self._contents, self._report
        for problem in contents.damage():
            self._add(f"the database's files are damaged: {problem}")
        if not contents.head.intact:
            self._add("the record of the journal's start is not what was written")
        for snapshot in contents.snapshots():
            report.snapshots += 1
            with self._despite(f"the snapshot at entry {snapshot.seq}"):
                self._check_snapshot(snapshot)
        for answer in contents.answers():
            report.answers += 1
            with self._despite(f"the answer to key {answer.key!r} of tenant {answer.tenant!r}"):
                self._check_answer(answer)
        for row in contents.rows():
            report.rows += 1
            with self._despite(f"entry {row.seq}"):
                self._check_row(row)
            tick(1)
        self._check_end()

    @contextmanager
    def _despite(self, name: str) -> Iterator[None]:
        """Report a value of the wrong type, such as text in place of a number, and continue."""
        try:
            yield
        except (TypeError, ValueError, AttributeError) as error:
            self._give_up(f"{name} cannot be read: {_reason(error)}")

    # Snapshots and answers

    def _check_snapshot(self, stored: StoredSnapshot) -> None:
        name = f"the snapshot at entry {stored.seq}"
        if stored.checksum != checksum(stored.seq, stored.data.encode(), stored.chain):
            self._add(f"{name} is not what was written")
        try:
            snapshot = decode_snapshot(stored.data)
        except msgspec.DecodeError as error:
            self._add(f"{name} cannot be read: {error}")
            return
        if snapshot.seq != stored.seq:
            self._add(f"{name} says that it is of entry {snapshot.seq}")
        if stored.seq > self._contents.last_seq:
            self._add(f"{name} is ahead of the journal, which ends at {self._contents.last_seq}")
        self._snapshots[stored.seq] = snapshot
        self._chains[stored.seq] = stored.chain

    def _check_answer(self, stored: StoredAnswer) -> None:
        name = f"the answer to key {stored.key!r} of tenant {stored.tenant!r}"
        tenant, key, digest, status, body_text, at, seq, given = stored
        if given != checksum(tenant, key, digest, status, body_text.encode(), at, seq):
            self._add(f"{name} is not what was written")
        if not 100 <= stored.status <= 599:
            self._add(f"{name} has the status {stored.status}")
        try:
            body = msgspec.json.decode(stored.body)
        except msgspec.DecodeError as error:
            self._add(f"{name} is not JSON: {error}")
            return
        if not self._is_time(stored.at):
            self._add(f"{name} was given at an impossible time, {stored.at}")
        if stored.seq > self._contents.last_seq:
            self._add(f"{name} was given after entry {stored.seq}, which does not exist")
        elif stored.status in (201, 202):
            for identity in _created(body):
                self._promised[identity] = stored.seq, name

    # The journal

    def _check_row(self, row: StoredRow) -> None:
        if self._last is None:
            self._begin(row.seq)
        elif row.seq != self._last.seq + 1:
            self._add(f"the journal jumps from entry {self._last.seq} to {row.seq}")
            self._state = self._begins_at = self._chain = None
        self._check_chain(row)
        self._check_stamp(row)
        self._last, self._moved = row, 0
        try:
            entry = decode(row.data)
        except msgspec.DecodeError as error:
            self._give_up(f"entry {row.seq} cannot be read: {error}")
            return
        if isinstance(entry, ClockSet):
            self._moved = entry.by
        if row.filed not in (None, index_keys(entry)):
            self._add(f"entry {row.seq} is filed under {row.filed}, which it is not about")
        self._check_created(entry, row.seq)
        if self._begins_at is not None:
            if row.seq == self._begins_at:
                self._begin_at(self._snapshots[row.seq])
            return
        for problem in self._occupancy.take(entry):
            self._add(f"entry {row.seq}: {problem}")
        if self._state is not None:
            self._apply(self._state, Row(row.seq, row.at, row.actor, entry, row.origin))

    def _check_chain(self, row: StoredRow) -> None:
        if self._chain is not None and row.chain != link(self._chain, *row[:-2]):
            self._add(f"entry {row.seq} is not what was written, or does not follow the one before")
        self._chain = row.chain
        self._compare_chain(row.seq)

    def _compare_chain(self, seq: int) -> None:
        if self._chain is not None and self._chains.get(seq, self._chain) != self._chain:
            self._add(f"the snapshot at entry {seq} is of another journal")

    def _begin(self, first: int) -> None:
        """Start at the first row, or at the first snapshot if earlier rows have been pruned."""
        base = self._contents.head.base
        if first != base + 1:
            self._add(f"the journal starts at entry {first} instead of {base + 1}")
            self._chain = None
        if first == 1:
            return
        begins = min((seq for seq in self._snapshots if seq >= first - 1), default=None)
        if begins is None:
            self._give_up(f"the journal begins at entry {first}, and no snapshot leads up to it")
        elif begins == first - 1:
            self._compare_chain(begins)
            self._begin_at(self._snapshots[begins])
        else:
            self._begins_at = begins

    def _begin_at(self, snapshot: Snapshot) -> None:
        self._begins_at = None
        assert self._state is not None
        try:
            restore_snapshot(snapshot, self._state)
        except Exception as error:
            self._give_up(
                f"the snapshot at entry {snapshot.seq} cannot be restored: {_reason(error)}"
            )
            return
        for problem in self._occupancy.begin_at(snapshot):
            self._add(f"the snapshot at entry {snapshot.seq}: {problem}")
        for allocation in snapshot.allocations:
            self._promised.pop(allocation.id, None)

    def _check_stamp(self, row: StoredRow) -> None:
        last = self._last
        if not self._is_time(row.at):
            self._add(f"entry {row.seq} was written at an impossible time, {row.at}")
        elif last is not None and row.at < last.at + self._moved:
            self._add(
                f"entry {row.seq} was written {last.at + self._moved - row.at:.3f} seconds before "
                "the previous entry, and no entry records a change of the clock"
            )
        if last is not None and row.epoch < last.epoch:
            self._add(
                f"entry {row.seq} was written in epoch {row.epoch}, after entries of epoch "
                f"{last.epoch}"
            )
        if not 0 < row.epoch <= self._contents.epoch:
            self._add(
                f"entry {row.seq} was written in epoch {row.epoch}, and the last epoch is "
                f"{self._contents.epoch}"
            )

    def _is_time(self, at: Seconds) -> bool:
        return math.isfinite(at) and EARLIEST <= at <= LATEST

    def _check_created(self, entry: AnyEntry, seq: int) -> None:
        match entry:
            case Allocated(record) | Queued(record):
                identity = record.id
            case TokenIssued(token):
                identity = token
            case TenantSet(tenant):
                identity = tenant.id
            case _:
                return
        promised = self._promised.pop(identity, None)
        if promised is not None and seq > promised[0]:
            self._add(f"{promised[1]} was given before entry {seq}, which made {identity}")

    def _apply(self, state: State, row: Row) -> None:
        entry = row.entry
        if isinstance(entry, Allocated | Queued) and entry.allocation.id in state.allocations:
            self._add(f"entry {row.seq}: allocation {entry.allocation.id} already exists")
        if isinstance(entry, Ended):
            living = state.allocations.get(entry.allocation.id)
            before = msgspec.structs.replace(entry.allocation, ended=None, cause=None)
            if living is not None and entry.allocation.cause in (Cause.FAILED, Cause.RECLAIMED):
                before = msgspec.structs.replace(before, detail=living.detail)
            if living != before:
                self._add(
                    f"entry {row.seq}: allocation {entry.allocation.id} ends as something else "
                    "than it was"
                )
        try:
            state.apply(row)
        except Exception as error:  # any error means that the journal is not consistent
            self._give_up(f"entry {row.seq} cannot be applied: {_reason(error)}")
            return
        snapshot = self._snapshots.get(row.seq)
        if snapshot is not None:
            self._compare_snapshot(state, snapshot)
            self._compare_state(state)

    def _give_up(self, why: str) -> None:
        self._add(f"{why}; what follows was not replayed")
        self._state = self._begins_at = None

    def _compare_snapshot(self, state: State, snapshot: Snapshot) -> None:
        replayed = decode_snapshot(encode_snapshot(snapshot_of(state)))
        try:
            restored = snapshot_of(restore_snapshot(snapshot, State()))
        except Exception as error:
            self._add(f"the snapshot at entry {snapshot.seq} cannot be restored: {_reason(error)}")
        else:
            if decode_snapshot(encode_snapshot(restored)) != snapshot:
                self._add(
                    f"the snapshot at entry {snapshot.seq} is another one once it is restored"
                )
        for name in snapshot.__struct_fields__:
            if getattr(snapshot, name) != getattr(replayed, name):
                self._add(f"the snapshot at entry {snapshot.seq} has other {name} than the journal")

    # The replayed state

    def _check_end(self) -> None:
        head = self._contents.head
        last = self._last.seq if self._last is not None else head.base
        if last != head.seq:
            self._add(f"the journal ends at entry {last}, and should end at entry {head.seq}")
        elif self._chain not in (None, head.chain):
            self._add(f"the last entry, {last}, is not the one that was written last")
        if self._last is None:
            self._compare_chain(last)
        if head.base == 0 and self._report.rows == last:
            # The journal is complete, so every id in an answer must be in it.
            for identity, (_, name) in self._promised.items():
                self._add(f"{name} contains {identity}, which is not in the journal")
        if self._state is not None:
            self._compare_state(self._state)

    def _compare_state(self, state: State) -> None:
        at = f"after entry {state.seq}"
        usage = self._occupancy.usage()
        for identity, tenant in state.tenants.items():
            counted = usage.pop(identity, HeldResources(0, 0, 0))
            kept = tenant.usage
            if counted != (kept.memory_slices, kept.compute_slices, kept.instances):
                self._add(
                    f"{at}, tenant {tenant.name!r} holds {tuple(counted)}, but the state has {kept}"
                )
        for identity in usage:
            self._add(f"{at}, tenant {identity!r} holds instances but does not exist")
        for name, count in self._occupancy.instances_by_node().items():
            node = state.nodes.get(name)
            if node is None or node.instances != count:
                self._add(f"{at}, node {name!r} has {count} instances, and the state differs")
        placed = self._occupancy.allocations
        if self._occupancy.instances != state.cluster.instance_count:
            self._add(f"{at}, the cluster has {state.cluster.instance_count} instances")
        self._compare_phases(state, at)
        self._compare_holds(state, at)
        for identity, number in state.tickets.items():
            if identity in placed:
                self._add(f"{at}, allocation {identity} waits though it is placed")
            if identity not in state.allocations or number not in state.waiting:
                self._add(f"{at}, allocation {identity} waits and is not in the queue")
        for identity in state.allocations:
            if (identity in placed) == (identity in state.tickets):
                self._add(f"{at}, allocation {identity} is neither placed nor waiting, or both")

    def _compare_phases(self, state: State, at: str) -> None:
        """Check that every instance has the phase that its agent last reported."""
        for identity, (_, parts) in self._occupancy.allocations.items():
            record = state.allocations.get(identity)
            if record is not None and list(record.parts) != parts:
                self._add(f"{at}, allocation {identity} has other instances in the state")
        left = {
            identity: {
                index: part
                for index, part in enumerate(record.parts)
                if part.phase not in (None, Phase.GONE)
            }
            for identity, record in state.leaving.items()
        }
        if left != self._occupancy.leaving:
            self._add(f"{at}, the state has other releasing instances than the journal")

    def _compare_holds(self, state: State, at: str) -> None:
        """Check that exactly the GPUs of ready nodes without holds are schedulable.

        A reserved window may keep requests from a whole GPU, which is not schedulable then.
        """
        cluster = state.cluster
        for node in state.nodes.values():
            ready = node.phase is NodePhase.READY and not node.holds
            held = node.agent.gpu_holds if node.agent is not None else {}
            for index, gpu in enumerate(node.gpus):
                takes = ready and index not in held
                offered = gpu in cluster.schedulable
                hidden = takes and not offered and cluster.reserved(gpu) is not None
                if cluster.takes_instances(gpu) != takes or (offered != takes and not hidden):
                    self._add(f"{at}, GPU {index} of node {node.name!r} is scheduled wrongly")


def _created(body: Any) -> list[str]:
    """The ids of the objects that an answer reports as created."""
    if not isinstance(body, dict):
        return []
    if isinstance(body.get("allocations"), list):
        return [identity for one in body["allocations"] for identity in _created(one)]
    identity = body.get("id")
    return [identity] if isinstance(identity, str) and identity else []


def _reason(error: Exception) -> str:
    text = str(error)
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}"
