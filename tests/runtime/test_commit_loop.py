"""The commit loop: answers only what is durable, and recovers from every failure by a reload."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from tests.control.control_plane import A100

from slicewise.control.actors import internal
from slicewise.control.commands import AddNode, Create, Release, SetTenant, Terms
from slicewise.control.handler import CommandHandler
from slicewise.control.ports import IdempotencyKey, Kept, StoreError
from slicewise.control.snapshot import Snapshot, snapshot_of
from slicewise.control.state import State
from slicewise.journal.entries import QuotaRecord, Row, Seconds, Want
from slicewise.runtime import commit_loop as commit_loop_module
from slicewise.runtime.commit_loop import (
    NO_DATABASE,
    NOT_LEADING,
    STOPPING,
    UNKNOWN_OUTCOME,
    Batch,
    CommitLoop,
    Outcome,
    Submission,
    load,
)
from slicewise.store.memory import MemoryJournal

WAIT_SECONDS = 60


class Clock:
    """A clock that advances only when it is set."""

    def __init__(self) -> None:
        self.now: Seconds = 1000.0

    def __call__(self) -> Seconds:
        return self.now


class FailingJournal(MemoryJournal):
    """A journal that fails on demand, before or after it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_before = self.fail_after = self.unreadable = 0
        self.appends = 0
        self.hold = threading.Event()
        self.hold.set()

    def append(
        self,
        epoch: int,
        rows: Sequence[Row],
        answers: Iterable[tuple[IdempotencyKey, Kept, Seconds]],
    ) -> None:
        """Append, or fail on demand before or after it."""
        self.hold.wait()
        self.appends += 1
        if self.fail_before:
            self.fail_before -= 1
            raise StoreError("the disk is full")
        super().append(epoch, rows, answers)
        if self.fail_after:
            self.fail_after -= 1
            raise StoreError("the connection was lost")

    def rows(self, after: int, limit: int) -> list[Row]:
        """Read, or fail on demand."""
        if self.unreadable:
            self.unreadable -= 1
            raise StoreError("no connection")
        return super().rows(after, limit)


class Runner:
    """A commit loop on an event loop in a thread, and the batches it delivered."""

    def __init__(self, journal: FailingJournal, **options: Any) -> None:
        self.journal = journal
        self.clock = Clock()
        self.batches: queue.Queue[Batch] = queue.Queue()
        self.rows: list[Row] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.commit_loop = asyncio.run_coroutine_threadsafe(
            self._start(options), self._loop
        ).result(WAIT_SECONDS)

    async def _start(self, options: dict[str, Any]) -> CommitLoop:
        ids = itertools.count()
        made = CommitLoop(
            self.journal,
            State,
            1,
            self.clock,
            lambda state: CommandHandler(state, lambda letter: f"{letter}{next(ids)}"),
            self.batches.put,
            lambda: 0.0,
            **options,
        )
        made.start()
        return made

    def submit(self, submission: Submission) -> None:
        """Queue a command."""
        self._loop.call_soon_threadsafe(self.commit_loop.submit, submission)

    def stop(self) -> None:
        """Stop the commit loop."""
        stopping = asyncio.run_coroutine_threadsafe(self.commit_loop.stop(), self._loop)
        stopping.result(WAIT_SECONDS)

    def close(self) -> None:
        """Stop the commit loop and its event loop."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    def next(self) -> Batch:
        """Wait for the next batch."""
        batch = self.batches.get(timeout=WAIT_SECONDS)
        self.rows += batch.rows
        return batch

    def ask(self, command: Any, key: str | None = None, digest: str = "d") -> Outcome:
        """Submit a command and wait for its outcome."""
        self.submit(Submission(command, ME, IdempotencyKey("acme", key) if key else None, digest))
        while not (batch := self.next()).outcomes:
            pass
        (outcome,) = batch.outcomes
        return outcome


@pytest.fixture
def journal() -> FailingJournal:
    """An empty journal."""
    return FailingJournal()


@pytest.fixture
def runner(journal: FailingJournal, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """A commit loop with a tenant and one GPU, and with short retries."""
    monkeypatch.setattr(commit_loop_module, "RETRY_SECONDS", (0.001,))
    runner = Runner(journal)
    assert runner.ask(SetTenant("acme", QuotaRecord(), True)).answer.status == 201
    assert runner.ask(AddNode("n0", A100, 1)).answer.status == 201
    yield runner
    runner.close()


ME = internal("me")
ONE = Create("acme", Terms(Want(profile="3g.40gb")))


def _body(outcome: Outcome) -> dict[str, Any]:
    body = msgspec.json.decode(outcome.answer.body)
    assert isinstance(body, dict)
    return body


def test_answered_commands_are_in_the_journal(runner: Runner) -> None:
    outcome = runner.ask(ONE)
    assert outcome.answer.status == 201
    assert runner.rows == runner.journal.kept_rows
    state = load(runner.journal, State())
    assert _body(outcome)["id"] in state.allocations


def test_commands_that_arrive_during_a_commit_share_the_next_one(runner: Runner) -> None:
    runner.journal.hold.clear()
    before = runner.journal.appends
    for _ in range(9):
        runner.submit(Submission(ONE, ME))
    runner.journal.hold.set()
    answered = 0
    while answered < 9:
        answered += len(runner.next().outcomes)
    assert runner.journal.appends - before <= 2


def test_batches_are_limited_in_size(journal: FailingJournal) -> None:
    runner = Runner(journal, max_batch=2)
    runner.ask(SetTenant("acme", QuotaRecord(), True))
    runner.journal.hold.clear()
    for _ in range(7):
        runner.submit(Submission(ONE, ME))
    runner.journal.hold.set()
    sizes: list[int] = []
    while sum(sizes) < 7:
        sizes.append(len(runner.next().outcomes))
    assert max(sizes) <= 2
    runner.close()


def test_an_idempotency_key_always_gets_the_first_answer(runner: Runner) -> None:
    first = runner.ask(ONE, key="k1")
    again = runner.ask(ONE, key="k1")
    assert again.answer == first.answer
    assert (first.replayed, again.replayed) == (False, True)
    assert runner.ask(ONE, key="k1", digest="other").answer.status == 422
    assert runner.ask(ONE, key="k2").answer.status == 201
    full = runner.ask(ONE, key="k3")
    assert full.answer.status == 409
    runner.ask(Release(_body(first)["id"]))
    assert runner.ask(ONE, key="k3").answer == full.answer
    assert runner.ask(ONE, key="k4").answer.status == 201


def test_a_rejected_request_can_be_corrected_with_the_same_key(runner: Runner) -> None:
    wrong = Create("unknown", ONE.terms)
    assert runner.ask(wrong, key="k").answer.status == 404
    assert runner.ask(ONE, key="k").answer.status == 201


def test_the_same_key_twice_in_one_batch(runner: Runner) -> None:
    runner.journal.hold.clear()
    for _ in range(3):
        runner.submit(Submission(ONE, ME, IdempotencyKey("acme", "k"), "d"))
    runner.journal.hold.set()
    outcomes: list[Outcome] = []
    while len(outcomes) < 3:
        outcomes += runner.next().outcomes
    assert len({t.answer for t in outcomes}) == 1
    assert len(load(runner.journal, State()).allocations) == 1


def test_a_failed_commit_has_no_effect(runner: Runner) -> None:
    runner.journal.fail_before = 1
    lost = runner.ask(ONE, key="k")
    assert lost.answer.status == 503
    assert _body(lost)["detail"] == UNKNOWN_OUTCOME
    assert not load(runner.journal, State()).allocations
    again = runner.ask(ONE, key="k")
    assert (again.answer.status, again.replayed) == (201, False)
    assert runner.rows == runner.journal.kept_rows
    assert runner.commit_loop.trouble is None


def test_a_commit_that_succeeded_but_reported_a_failure_is_found_by_the_reload(
    runner: Runner,
) -> None:
    runner.journal.fail_after = 1
    runner.submit(Submission(ONE, ME, IdempotencyKey("acme", "k"), "d"))
    assert runner.next().outcomes[0].answer.status == 503
    caught_up = runner.next()
    assert (len(caught_up.rows), caught_up.outcomes) == (1, [])
    again = runner.ask(ONE, key="k")
    assert (again.answer.status, again.replayed) == (201, True)
    assert len(load(runner.journal, State()).allocations) == 1
    assert runner.rows == runner.journal.kept_rows


def test_commands_are_refused_while_the_database_is_unreachable(runner: Runner) -> None:
    runner.journal.fail_before = 1
    runner.journal.unreadable = 1_000_000
    assert runner.ask(ONE).answer.status == 503
    outcome = runner.ask(ONE)
    assert _body(outcome)["detail"] == NO_DATABASE
    assert runner.commit_loop.trouble == "no connection"
    runner.journal.unreadable = 0
    while (outcome := runner.ask(ONE)).answer.status == 503:
        pass
    assert outcome.answer.status == 201


def test_commits_that_keep_failing_are_retried_with_pauses(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expired lease is due again after every failure, as on a full disk."""
    monkeypatch.setattr(commit_loop_module, "RETRY_SECONDS", (0.0, 3600.0))
    runner.ask(Create("acme", Terms(Want(profile="7g.80gb"), lease=10)))
    runner.journal.fail_before = 1_000_000
    before = runner.journal.appends
    runner.clock.now += 11
    runner.submit(Submission(Release("unknown"), ME))
    while runner.journal.appends < before + 2:
        time.sleep(0.001)
    runner.stop()
    assert runner.journal.appends == before + 2


def test_the_loop_stops_without_a_database(runner: Runner) -> None:
    runner.journal.fail_before = 1
    runner.journal.unreadable = 1_000_000
    assert runner.ask(ONE).answer.status == 503
    runner.stop()
    runner.journal.unreadable = 0


def test_a_fenced_loop_writes_nothing_and_ends(runner: Runner) -> None:
    runner.journal.epoch = 2
    outcome = runner.ask(ONE)
    assert _body(outcome)["detail"] == NOT_LEADING
    runner.stop()
    assert runner.commit_loop.fenced
    assert runner.ask(ONE).answer.status == 503
    assert not load(runner.journal, State()).allocations


def test_an_unexpected_error_answers_its_batch_and_ends_the_loop(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: CommandHandler, steady: Seconds) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(CommandHandler, "expire", fail)
    outcome = runner.ask(ONE)
    assert (outcome.answer.status, _body(outcome)["detail"]) == (503, UNKNOWN_OUTCOME)
    assert _body(runner.ask(ONE))["detail"] == STOPPING
    assert not runner.commit_loop.alive


def test_batches_without_entries_yield_the_event_loop(journal: FailingJournal) -> None:
    runner = Runner(journal, max_batch=1)

    async def decide() -> set[int]:
        for _ in range(5):
            runner.commit_loop.submit(Submission(Release("unknown", None), ME))
        seen = set()
        while (answered := runner.batches.qsize()) < 5:
            seen.add(answered)
            await asyncio.sleep(0)
        return seen

    seen = asyncio.run_coroutine_threadsafe(decide(), runner._loop).result(WAIT_SECONDS)
    assert len(seen) >= 4, "something else runs between two batches"
    runner.close()


def test_an_expired_lease_is_committed_without_a_command(runner: Runner) -> None:
    runner.ask(Create("acme", Terms(Want(profile="7g.80gb"), lease=0.01)))
    runner.clock.now += 1
    batch = runner.next()
    assert [row.entry.__class__.__name__ for row in batch.rows] == ["Ended"]
    assert not batch.outcomes


def test_a_warning_is_committed_without_a_command(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.commit_loop, "_fresh_state", lambda: State(lease_warning=0.01))
    runner.journal.fail_before = 1  # the loop reads its state again
    while runner.ask(ONE).answer.status != 201:
        pass
    runner.ask(Create("acme", Terms(Want(profile="1g.10gb"), lease=0.02)))
    runner.clock.now += 0.015
    batch = runner.next()
    assert [row.entry.__class__.__name__ for row in batch.rows] == ["LeaseEnding"]
    assert not batch.outcomes


def test_a_stop_commits_what_is_queued_and_keeps_a_snapshot(runner: Runner) -> None:
    runner.journal.hold.clear()
    for _ in range(5):
        runner.submit(Submission(ONE, ME))
    stopper = threading.Thread(target=runner.stop)
    stopper.start()
    runner.journal.hold.set()
    stopper.join()
    outcomes: list[Outcome] = []
    while len(outcomes) < 5:
        outcomes += runner.next().outcomes
    assert {t.answer.status for t in outcomes} <= {201, 409, 503}
    assert runner.journal.snapshots[-1].seq == len(runner.journal.kept_rows)
    assert _body(runner.ask(ONE))["detail"] == STOPPING


def test_a_failure_to_keep_a_snapshot_does_not_stop_the_loop(
    journal: FailingJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(snapshot: Snapshot) -> None:
        raise StoreError("the disk is full")

    loads: list[None] = []
    monkeypatch.setattr(journal, "save_snapshot", full)
    monkeypatch.setattr(journal, "last_snapshot", lambda: loads.append(None))
    problems: list[str] = []
    runner = Runner(journal, rows_between_snapshots=3, warn=problems.append)
    runner.ask(SetTenant("acme", QuotaRecord(), True))
    runner.ask(AddNode("n0", A100, 1))
    begun = len(loads)
    for _ in range(5):
        runner.ask(ONE)
    runner.close()
    assert not runner.commit_loop.alive
    assert len(loads) == begun  # no reload: the commits were not in doubt
    assert 1 <= len(problems) <= len(journal.kept_rows) // 3 + 1
    assert "the disk is full" in problems[0]
    assert runner.commit_loop.trouble is None


def test_snapshots_are_kept_as_the_journal_grows_and_read_at_a_start(
    journal: FailingJournal,
) -> None:
    runner = Runner(journal, rows_between_snapshots=3)
    runner.ask(SetTenant("acme", QuotaRecord(), True))
    runner.ask(AddNode("n0", A100, 1))
    runner.ask(ONE)
    runner.ask(ONE)
    runner.ask(ONE)
    runner.close()
    assert len(journal.snapshots) >= 2
    complete = State()
    for row in journal.kept_rows:
        complete.apply(row)
    assert snapshot_of(load(journal, State())) == snapshot_of(complete)
    # A new leader delivers only rows that the receiver does not have.
    successor = Runner(journal, delivered=len(journal.kept_rows) - 1)
    assert [row.seq for row in successor.next().rows] == [len(journal.kept_rows)]
    assert successor.ask(ONE).answer.status == 409
    successor.close()
    assert successor.commit_loop.waiting == 0


def test_a_start_that_reads_many_rows_keeps_a_snapshot_early(journal: FailingJournal) -> None:
    runner = Runner(journal, rows_between_snapshots=1000)
    runner.ask(SetTenant("acme", QuotaRecord(), True))
    runner.ask(AddNode("n0", A100, 1))
    runner.ask(ONE)
    assert not journal.snapshots  # as if the process were killed here
    successor = Runner(journal, rows_between_snapshots=4, delivered=len(journal.kept_rows))
    assert successor.ask(ONE).answer.status == 201
    assert successor.ask(ONE).answer.status == 409
    assert journal.snapshots
    successor.close()
    runner.close()
