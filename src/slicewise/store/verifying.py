"""Verifying: everything that must be true of a store, worked out again from its journal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from slicewise.control import image as images_room
from slicewise.control.entries import (
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
    TokenIssued,
    concerns,
    decode,
    kind,
)
from slicewise.control.hardware import Phase
from slicewise.control.image import Image, image_of
from slicewise.control.image import restore as restore_image
from slicewise.control.state import State
from slicewise.store.backups import Tick, no_tick
from slicewise.store.chain import checksum, link
from slicewise.store.contents import Contents, StoredAnswer, StoredImage, StoredRow
from slicewise.store.occupancy import Held, Occupancy
from slicewise.store.sql import SqlStore

MAX_FINDINGS = 1000


@dataclass
class Report:
    """What was looked at, and what was found; a store without findings is clean."""

    rows: int = 0
    images: int = 0
    answers: int = 0
    findings: list[str] = field(default_factory=list)
    more: int = 0
    """Findings beyond those that are listed."""

    @property
    def clean(self) -> bool:
        """Whether everything is as it must be."""
        return not self.findings

    def add(self, finding: str) -> None:
        """Write down something that is wrong."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)
        else:
            self.more += 1


def verify(source: SqlStore | Contents, tick: Tick = no_tick) -> Report:
    """Replay the journal from its beginning, and hold everything against it."""
    report = Report()
    contents = source.contents() if isinstance(source, SqlStore) else source
    _Inspection(contents, report).run(tick)
    return report


class _Inspection:
    """One pass through the contents of a store."""

    def __init__(self, contents: Contents, report: Report) -> None:
        self._contents = contents
        self._report = report
        self._add = report.add
        self._images: dict[int, Image] = {}
        self._chains: dict[int, bytes] = {}
        """By image: the digest of its row, as it says."""
        self._chain: bytes | None = contents.head.base_chain
        """The digest of the last row; None if it is not known what it should be."""
        self._promised: dict[str, tuple[int, str]] = {}
        """By id that an answer speaks of: the row it must be in front of, and the answer."""
        self._state: State | None = State()
        """None before the first image of a journal whose beginning is not kept, and once it could
        not be applied any further."""
        self._begins_at: int | None = None
        """The image with which to begin, where it is yet to come."""
        self._occupancy = Occupancy()
        self._last: StoredRow | None = None
        self._moved: Seconds = 0
        """How far the last row moved service time, if it did."""

    def run(self, tick: Tick) -> None:
        contents, report = self._contents, self._report
        for problem in contents.damage():
            self._add(f"the database's files are damaged: {problem}")
        if not contents.head.intact:
            self._add("the record of where the journal begins is not what was written")
        for image in contents.images():
            report.images += 1
            with self._despite(f"the image at entry {image.seq}"):
                self._look_at_image(image)
        for answer in contents.answers():
            report.answers += 1
            with self._despite(f"the answer to key {answer.key!r} of tenant {answer.tenant!r}"):
                self._look_at_answer(answer)
        for row in contents.rows():
            report.rows += 1
            with self._despite(f"entry {row.seq}"):
                self._look_at_row(row)
            tick(1)
        self._look_at_end()

    @contextmanager
    def _despite(self, name: str) -> Iterator[None]:
        """Go on though a column holds what was never written, such as text for a number."""
        try:
            yield
        except (TypeError, ValueError, AttributeError) as error:
            self._give_up(f"{name} cannot be read: {_reason(error)}")

    # Images and answers

    def _look_at_image(self, stored: StoredImage) -> None:
        name = f"the image at entry {stored.seq}"
        if stored.checksum != checksum(stored.seq, stored.data.encode(), stored.chain):
            self._add(f"{name} is not what was written")
        try:
            image = images_room.decode(stored.data)
        except msgspec.DecodeError as error:
            self._add(f"{name} cannot be read: {error}")
            return
        if image.seq != stored.seq:
            self._add(f"{name} says that it is of entry {image.seq}")
        if stored.seq > self._contents.last_seq:
            self._add(f"{name} is ahead of the journal, which ends at {self._contents.last_seq}")
        self._images[stored.seq] = image
        self._chains[stored.seq] = stored.chain

    def _look_at_answer(self, stored: StoredAnswer) -> None:
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
            self._add(f"{name} was given after entry {stored.seq}, which there is not")
        elif stored.status in (201, 202):
            for identity in _created(body):
                self._promised[identity] = stored.seq, name

    # The journal

    def _look_at_row(self, row: StoredRow) -> None:
        if self._last is None:
            self._begin(row.seq)
        elif row.seq != self._last.seq + 1:
            self._add(f"the journal jumps from entry {self._last.seq} to {row.seq}")
            self._state = self._begins_at = self._chain = None
        self._look_at_chain(row)
        self._look_at_stamp(row)
        self._last, self._moved = row, 0
        try:
            entry = decode(row.data)
        except msgspec.DecodeError as error:
            self._give_up(f"entry {row.seq} cannot be read: {error}")
            return
        if isinstance(entry, ClockSet):
            self._moved = entry.by
        if row.filed not in (None, (kind(entry), *concerns(entry))):
            self._add(f"entry {row.seq} is filed under {row.filed}, which it is not about")
        self._keep_promise(entry, row.seq)
        if self._begins_at is not None:
            if row.seq == self._begins_at:
                self._begin_at(self._images[row.seq])
            return
        for problem in self._occupancy.take(entry):
            self._add(f"entry {row.seq}: {problem}")
        if self._state is not None:
            self._apply(self._state, Row(row.seq, row.at, row.actor, entry, row.origin))

    def _look_at_chain(self, row: StoredRow) -> None:
        if self._chain is not None and row.chain != link(self._chain, *row[:-2]):
            self._add(f"entry {row.seq} is not what was written, or not behind what it followed")
        self._chain = row.chain
        self._compare_chain(row.seq)

    def _compare_chain(self, seq: int) -> None:
        if self._chain is not None and self._chains.get(seq, self._chain) != self._chain:
            self._add(f"the image at entry {seq} is of another journal")

    def _begin(self, first: int) -> None:
        """Begin at the first row, or at the first image if the rows before are not kept."""
        base = self._contents.head.base
        if first != base + 1:
            self._add(f"the journal begins at entry {first}, and should begin at {base + 1}")
            self._chain = None
        if first == 1:
            return
        begins = min((seq for seq in self._images if seq >= first - 1), default=None)
        if begins is None:
            self._give_up(f"the journal begins at entry {first}, and no image leads up to it")
        elif begins == first - 1:
            self._compare_chain(begins)
            self._begin_at(self._images[begins])
        else:
            self._begins_at = begins

    def _begin_at(self, image: Image) -> None:
        self._begins_at = None
        assert self._state is not None
        try:
            restore_image(image, self._state)
        except Exception as error:
            self._give_up(f"the image at entry {image.seq} cannot be restored: {_reason(error)}")
            return
        for problem in self._occupancy.begin_at(image):
            self._add(f"the image at entry {image.seq}: {problem}")
        for allocation in image.allocations:
            self._promised.pop(allocation.id, None)

    def _look_at_stamp(self, row: StoredRow) -> None:
        last = self._last
        if not self._is_time(row.at):
            self._add(f"entry {row.seq} was written at an impossible time, {row.at}")
        elif last is not None and row.at < last.at + self._moved:
            self._add(
                f"entry {row.seq} was written {last.at + self._moved - row.at:.3f} seconds before "
                "the entry in front of it, and nothing in between says that the clock was set"
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

    def _keep_promise(self, entry: AnyEntry, seq: int) -> None:
        match entry:
            case Allocated(record) | Queued(record):
                identity = record.id
            case TokenIssued(token):
                identity = token
            case _:
                return
        promised = self._promised.pop(identity, None)
        if promised is not None and seq > promised[0]:
            self._add(f"{promised[1]} was given before entry {seq}, which made {identity}")

    def _apply(self, state: State, row: Row) -> None:
        entry = row.entry
        if isinstance(entry, Allocated | Queued) and entry.allocation.id in state.allocations:
            self._add(f"entry {row.seq}: allocation {entry.allocation.id} is there already")
        if isinstance(entry, Ended):
            living = state.allocations.get(entry.allocation.id)
            before = msgspec.structs.replace(entry.allocation, ended=None, cause=None)
            if living is not None and entry.allocation.cause is Cause.FAILED:
                before = msgspec.structs.replace(before, detail=living.detail)
            if living != before:
                self._add(
                    f"entry {row.seq}: allocation {entry.allocation.id} ends as something else "
                    "than it was"
                )
        try:
            state.apply(row)
        except Exception as error:  # whatever it is, the journal says what cannot be
            self._give_up(f"entry {row.seq} cannot be applied: {_reason(error)}")
            return
        image = self._images.get(row.seq)
        if image is not None:
            self._compare_image(state, image)
            self._compare_standings(state)

    def _give_up(self, why: str) -> None:
        self._add(f"{why}; what follows was not replayed")
        self._state = self._begins_at = None

    def _compare_image(self, state: State, image: Image) -> None:
        replayed = images_room.decode(images_room.encode(image_of(state)))
        if image.since is None:  # one of an older version, which did not know of lives
            orphans = {record.id for record in replayed.leaving if not record.tenant}
            leaving = tuple(
                msgspec.structs.replace(record, tenant="") if record.id in orphans else record
                for record in image.leaving
            )
            image = msgspec.structs.replace(image, since=replayed.since, leaving=leaving)
        try:
            restored = image_of(restore_image(image, State()))
        except Exception as error:
            self._add(f"the image at entry {image.seq} cannot be restored: {_reason(error)}")
        else:
            if images_room.decode(images_room.encode(restored)) != image:
                self._add(f"the image at entry {image.seq} is another one once it is restored")
        for name in image.__struct_fields__:
            if getattr(image, name) != getattr(replayed, name):
                self._add(f"the image at entry {image.seq} has other {name} than the journal")

    # What the state counts

    def _look_at_end(self) -> None:
        head = self._contents.head
        last = self._last.seq if self._last is not None else head.base
        if last != head.seq:
            self._add(f"the journal ends at entry {last}, and should end at entry {head.seq}")
        elif self._chain not in (None, head.chain):
            self._add(f"entry {last}, the last one, is not the one that was written last")
        if self._last is None:
            self._compare_chain(last)
        if head.base == 0 and self._report.rows == last:
            # All of the journal is there, so whatever was answered must be in it.
            for identity, (_, name) in self._promised.items():
                self._add(f"{name} speaks of {identity}, of which the journal knows nothing")
        if self._state is not None:
            self._compare_standings(self._state)

    def _compare_standings(self, state: State) -> None:
        at = f"after entry {state.seq}"
        usage = self._occupancy.usage()
        for name, tenant in state.tenants.items():
            counted = usage.pop(name, Held(0, 0, 0))
            kept = tenant.usage
            if counted != (kept.memory_slices, kept.compute_slices, kept.instances):
                self._add(
                    f"{at}, tenant {name!r} holds {tuple(counted)}, and the state says {kept}"
                )
        for name in usage:
            self._add(f"{at}, tenant {name!r} holds instances and does not exist")
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
        """Every instance has come as far as its agent said."""
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
            self._add(f"{at}, the state says otherwise which instances are leaving")

    def _compare_holds(self, state: State, at: str) -> None:
        """A GPU takes new instances where its node is ready and nothing speaks against it."""
        for node in state.nodes.values():
            ready = node.phase is NodePhase.READY and not node.holds
            held = node.agent.gpu_holds if node.agent is not None else {}
            for index, gpu in enumerate(node.gpus):
                if (gpu in state.cluster.schedulable) != (ready and index not in held):
                    self._add(f"{at}, GPU {index} of node {node.name!r} is scheduled wrongly")


def _created(body: Any) -> list[str]:
    """The ids of what an answer says was created, as far as it has such ids."""
    if not isinstance(body, dict):
        return []
    if isinstance(body.get("allocations"), list):
        return [identity for one in body["allocations"] for identity in _created(one)]
    identity = body.get("id")
    return [identity] if isinstance(identity, str) and identity else []


def _reason(error: Exception) -> str:
    text = str(error)
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}"
