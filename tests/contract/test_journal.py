"""The contract of `control.ports`, tested with every implementation."""

from __future__ import annotations

import itertools
import threading

import msgspec
import pytest
from tests.contract.conftest import Led
from tests.control.control_plane import ControlPlane
from tests.tenants import ref

from slicewise.control.answers import Answer
from slicewise.control.ports import FencedError, IdempotencyKey, Kept, Store, StoreError, rows_after
from slicewise.control.snapshot import snapshot_of
from slicewise.control.state import State
from slicewise.journal.entries import (
    AnyEntry,
    Rejected,
    Role,
    Row,
    Seconds,
    TenantSet,
    TokenIssued,
    TokenRevoked,
    Want,
    index_keys,
)
from slicewise.runtime.commit_loop import load

NOW: Seconds = 1_700_000_000.25


def tenants(first: int, count: int) -> list[Row]:
    """Rows that each create a tenant."""
    return [
        Row(seq, NOW + seq, "me", TenantSet(ref(f"t{seq}"))) for seq in range(first, first + count)
    ]


def kept(status: int = 201, body: bytes = b'{"id":"a1"}', digest: str = "d") -> Kept:
    return Kept(digest, Answer(status, body))


# The journal


def test_an_empty_journal(led: Led) -> None:
    assert led.journal.rows(0, 10) == []
    assert led.journal.last_snapshot() is None
    assert led.journal.answers([IdempotencyKey("t", "k")]) == {}
    assert led.journal.answers([]) == {}


def test_rows_are_read_back_unchanged(led: Led) -> None:
    office = ControlPlane()
    office.tenant()
    office.node(gpus=2)
    office.create("3g.40gb", labels={"name": 'ü "quoted" \\ \n', "zero": "\x00"}, lease=0.1)
    office.create("7g.80gb", wait=1.5)
    office.create("7g.80gb", count=2)
    office.rows[1] = msgspec.structs.replace(office.rows[1], origin="2001:db8::7")
    led.journal.append(led.epoch, office.rows, [])
    assert led.journal.rows(0, 1000) == office.rows


def test_rows_are_paged(led: Led) -> None:
    rows = tenants(1, 25)
    led.journal.append(led.epoch, rows[:10], [])
    led.journal.append(led.epoch, rows[10:], [])
    assert led.journal.rows(7, 5) == rows[7:12]
    assert led.journal.rows(25, 5) == []
    assert list(rows_after(led.journal, 3, page=4)) == rows[3:]


def test_answers_are_found_by_owner_and_key(led: Led) -> None:
    mine = kept(409, '{"detail":"ü"}'.encode(), "digest")
    led.journal.append(
        led.epoch,
        [],
        [(IdempotencyKey("a", "k"), mine, NOW), (IdempotencyKey("b", "k"), kept(), NOW)],
    )
    led.journal.append(led.epoch, tenants(1, 1), [(IdempotencyKey("a", "l"), kept(), NOW)])
    asked = [
        IdempotencyKey("a", "k"),
        IdempotencyKey("a", "missing"),
        IdempotencyKey("b", "k"),
        IdempotencyKey("b", "l"),
        IdempotencyKey("a", "k"),
    ]
    assert led.journal.answers(asked) == {
        IdempotencyKey("a", "k"): mine,
        IdempotencyKey("b", "k"): kept(),
    }


def test_answers_of_a_large_batch(led: Led) -> None:
    keys = [IdempotencyKey(f"t{i % 7}", f"{i}'\"%s{{}}") for i in range(1500)]
    led.journal.append(led.epoch, [], [(key, kept(digest=key.key), NOW) for key in keys])
    found = led.journal.answers([*keys, IdempotencyKey("t1", "missing")])
    assert found == {key: kept(digest=key.key) for key in keys}


def test_a_stale_epoch_is_fenced(led: Led) -> None:
    led.journal.append(led.epoch, tenants(1, 2), [])
    for wrong in (led.epoch - 1, led.epoch + 1):
        with pytest.raises(FencedError):
            led.journal.append(wrong, tenants(3, 1), [(IdempotencyKey("a", "k"), kept(), NOW)])
    assert led.journal.rows(0, 10) == tenants(1, 2)
    assert led.journal.answers([IdempotencyKey("a", "k")]) == {}


def test_the_latest_snapshot_is_kept(led: Led) -> None:
    office = ControlPlane()
    office.tenant()
    office.node(gpus=2)
    led.journal.append(led.epoch, office.rows, [])
    led.journal.save_snapshot(snapshot_of(office.state))
    office.create("3g.40gb")
    led.journal.append(led.epoch, office.rows[-1:], [])
    snapshot = snapshot_of(office.state)
    led.journal.save_snapshot(snapshot)
    assert led.journal.last_snapshot() == snapshot
    assert snapshot_of(load(led.journal, office.fresh())) == snapshot


# The store


def lead(store: Store, holder: str = "me") -> int:
    epoch = store.lead(holder, f"http://{holder}", 3600)
    assert epoch is not None
    return epoch


def test_a_leader_leads_until_it_resigns(store: Store) -> None:
    assert store.leader() is None
    first = lead(store, "one")
    assert store.lead("two", "http://two", 3600) is None
    leader = store.leader()
    assert leader is not None
    assert leader[:3] == (first, "one", "http://one")
    store.resign(first)
    assert store.leader() is None
    second = lead(store, "two")
    assert second > first


def test_an_expired_lease_gives_a_new_epoch(store: Store) -> None:
    first = store.lead("one", "", 0)
    assert first is not None
    assert store.leader() is None
    second = lead(store, "two")
    assert second > first
    assert not store.renew(first, 10, 0)
    store.resign(first)
    leader = store.leader()
    assert leader is not None
    assert leader.epoch == second
    with pytest.raises(FencedError):
        store.append(first, tenants(1, 1), [])
    store.append(second, tenants(1, 1), [])


def test_a_lease_can_be_renewed_until_another_process_leads(store: Store) -> None:
    epoch = store.lead("one", "", 0)
    assert epoch is not None
    assert store.renew(epoch, 3600, 0)
    assert store.lead("two", "", 10) is None
    before = store.leader()
    assert store.renew(epoch, 7200, 0)
    after = store.leader()
    assert before is not None
    assert after is not None
    assert after.until > before.until
    assert not store.renew(epoch + 1, 10, 0)


def test_rows_with_a_gap_are_refused(store: Store) -> None:
    epoch = lead(store)
    store.append(epoch, tenants(1, 3), [])
    assert store.last_seq() == 3
    for first in (1, 3, 5):
        with pytest.raises(StoreError):
            store.append(epoch, tenants(first, 2), [(IdempotencyKey("a", "k"), kept(), NOW)])
    assert store.rows(0, 10) == tenants(1, 3)
    assert store.answers([IdempotencyKey("a", "k")]) == {}
    store.append(epoch, tenants(4, 2), [])
    assert store.last_seq() == 5


def test_a_key_is_answered_once(store: Store) -> None:
    epoch = lead(store)
    store.append(epoch, tenants(1, 1), [(IdempotencyKey("a", "k"), kept(), NOW)])
    with pytest.raises(StoreError):
        store.append(epoch, tenants(2, 1), [(IdempotencyKey("a", "k"), kept(409), NOW)])
    assert store.last_seq() == 1
    assert store.answers([IdempotencyKey("a", "k")]) == {IdempotencyKey("a", "k"): kept()}


def test_a_big_batch(store: Store) -> None:
    epoch = lead(store)
    rows = tenants(1, 3000)
    store.append(epoch, rows, [(IdempotencyKey("t", str(i)), kept(), NOW) for i in range(512)])
    assert store.rows(0, 5000) == rows


def test_old_answers_are_deleted(store: Store) -> None:
    epoch = lead(store)
    keys = [IdempotencyKey("t", str(i)) for i in range(6000)]
    store.append(epoch, [], [(key, kept(), NOW + i) for i, key in enumerate(keys)])
    assert store.forget_answers(NOW) == 0
    forgotten = 0
    while some := store.forget_answers(NOW + 5500):
        assert some <= 5000  # so that other work can be done in between
        forgotten += some
    assert forgotten == 5500
    assert set(store.answers(keys)) == set(keys[5500:])


def test_the_last_two_snapshots_are_kept(store: Store) -> None:
    snapshot = snapshot_of(State())
    with pytest.raises(StoreError, match="no entry 3 to store a snapshot of"):
        store.save_snapshot(msgspec.structs.replace(snapshot, seq=3))
    store.append(lead(store), tenants(1, 12), [])
    for seq in (3, 9, 5, 9, 12):
        store.save_snapshot(msgspec.structs.replace(snapshot, seq=seq))
    last = store.last_snapshot()
    assert last is not None
    assert last.seq == 12


def test_history_filters(store: Store) -> None:
    entries: list[AnyEntry] = [
        TenantSet(ref("a")),
        TokenIssued("t1", "x", Role.TENANT, tenant=ref("a")),
        TokenIssued("t2", "y", Role.TENANT, tenant=ref("b")),
        TokenRevoked("t1"),
        Rejected(ref("a"), Want(profile="1g.10gb"), 1, "capacity", "full"),
        Rejected(ref("b"), Want(profile="1g.10gb"), 1, "quota", "too much"),
        Rejected(ref("b"), Want(profile="2g.20gb"), 1, "quota", "too much"),
    ]
    rows = [Row(seq, NOW, "me", entry) for seq, entry in enumerate(entries * 10, 1)]
    store.append(lead(store), rows, [])
    backwards = rows[::-1]
    for before, limit, tenant, subject, kinds in itertools.product(
        (None, 1, 33, 71),
        (1, 5, 1000),
        (None, "a", "b", "unknown"),
        (None, "t1", "a", "nothing"),
        ((), ("rejected",), ("token-issued", "rejected"), ("tenant-set", "token-revoked"), ("x",)),
    ):
        expected = [
            row
            for row in backwards
            if (before is None or row.seq < before)
            and tenant in (None, index_keys(row.entry)[1])
            and subject in (None, index_keys(row.entry)[2])
            and (not kinds or index_keys(row.entry)[0] in kinds)
        ]
        found = store.history(
            before=before, limit=limit, tenant=tenant, subject=subject, kinds=kinds
        )
        assert found == expected[:limit]


def test_history_of_impossible_filters_is_empty(store: Store) -> None:
    rows = [Row(1, NOW, "me", TenantSet(ref("a")))]
    store.append(lead(store), rows, [])
    far = 10**17  # clients can invent cursors
    assert store.history(before=far, limit=5, tenant="a", kinds=("ended",)) == []
    assert store.history(before=far, limit=5, tenant="a") == rows
    assert store.history(before=None, limit=5, tenant="a\0") == []
    assert store.history(before=None, limit=5, subject="\0") == []


def test_waiting_for_rows_ends_with_a_row(store: Store) -> None:
    epoch = lead(store)
    assert not store.wait_for_rows(0, 0.01)
    told: list[bool] = []
    waits = threading.Thread(target=lambda: told.append(store.wait_for_rows(1, 60)))
    store.append(epoch, tenants(1, 1), [])
    assert store.wait_for_rows(0, 60)
    waits.start()
    store.append(epoch, tenants(2, 1), [])
    waits.join()
    assert told == [True]


def test_waiting_for_rows_ends_when_the_store_closes(store: Store) -> None:
    told: list[bool] = []
    waits = threading.Thread(target=lambda: told.append(store.wait_for_rows(0, 600)))
    waits.start()
    store.close()
    waits.join()
    assert told == [False]


def test_a_closed_store_raises_an_error(store: Store) -> None:
    store.last_seq()
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.last_seq()
    assert not store.wait_for_rows(0, 1)


def test_calls_from_many_threads(store: Store) -> None:
    epoch = lead(store)
    rows = tenants(1, 120)
    problems: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                seen = store.rows(0, 1000)
                assert seen == rows[: len(seen)]
                assert store.history(before=None, limit=5, kinds=("tenant-set",)) is not None
                assert store.renew(epoch, 3600, 0)
                store.last_seq()
        except BaseException as problem:
            problems.append(problem)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for row in rows:
        store.append(epoch, [row], [(IdempotencyKey("t", str(row.seq)), kept(), NOW)])
    done.set()
    for reader in readers:
        reader.join()
    assert not problems
    assert store.rows(0, 1000) == rows
