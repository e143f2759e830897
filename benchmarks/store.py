"""Measure how fast the store commits, backs up, restores and verifies.

Usage: store.py [FOLDER]

Writes the rows and answers of a busy service in batches of several sizes to SQLite, in each
supported journal mode, and to a temporary PostgreSQL server if it is installed. FOLDER (default:
the current one) determines the disk; every commit is synced. For comparison it also prints how
often the disk can sync.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

from slicewise.control.answers import Answer
from slicewise.control.ports import IdempotencyKey, Kept
from slicewise.journal.entries import (
    Allocated,
    AllocationRecord,
    AnyEntry,
    Ended,
    Part,
    Row,
    TenantRef,
    Want,
)
from slicewise.store import backup, restore
from slicewise.store.sql import SqlStore
from slicewise.store.sqlite import Mode, SqliteStore

BATCHES = ((1, 200), (32, 150), (256, 80))
MODES = (
    Mode("WAL", "EXCLUSIVE", ""),
    Mode("WAL", "NORMAL", ""),
    Mode("PERSIST", "NORMAL", ""),
    Mode("TRUNCATE", "NORMAL", ""),
)
START = 1_700_000_000.0
BODY = b"x" * 900
"""As long as the answer to an allocation."""
PART = Part("node-17", 3, "A100-80GB", "3g.40gb", 4, 4, 3, 40)


def batches(
    size: int, count: int
) -> Iterator[tuple[list[Row], list[tuple[IdempotencyKey, Kept, float]]]]:
    """Yield batches of allocations that are created, each with an answer, and end at once."""
    seq = 0
    for _ in range(count):
        rows: list[Row] = []
        answers = []
        while len(rows) < size:
            record = AllocationRecord(
                "a" + token_hex(10),
                TenantRef(f"tenant:{seq % 40}", f"tenant-{seq % 40}"),
                Want(profile="3g.40gb"),
                requested=START + seq,
                placed=START + seq,
                parts=(PART,),
            )
            entries: list[AnyEntry] = [Allocated(record), Ended(record)]
            for entry in entries[: size - len(rows)]:
                seq += 1
                rows.append(Row(seq, START + seq, "t0123456789abcdefghij", entry))
            key = IdempotencyKey(record.tenant.id, token_hex(16))
            answers.append((key, Kept("d" * 64, Answer(201, BODY)), START + seq))
        yield rows, answers


def measure(name: str, store: SqlStore, size: int, count: int) -> None:
    """Commit batches and print the rate."""
    epoch = store.lead("bench", "", 3600)
    assert epoch is not None
    work = list(batches(size, count))
    begun = time.perf_counter()
    for rows, answers in work:
        store.append(epoch, rows, answers)
    took = time.perf_counter() - begun
    begun = time.perf_counter()
    for _, answers in work:
        assert len(store.answers([key for key, _, _ in answers])) == len(answers)
    asked = time.perf_counter() - begun
    print(
        f"{name:22} {size:4} rows a commit: {count / took:6.0f} commits/s "
        f"{size * count / took:8.0f} rows/s, {took / count * 1e3:6.2f} ms; "
        f"answers looked up in {asked / count * 1e3:5.2f} ms",
        flush=True,
    )


def syncs_per_second(folder: Path) -> float:
    """Return how often per second 8 KiB can be written and synced."""
    with tempfile.TemporaryFile(dir=folder) as file:
        begun = time.perf_counter()
        for _ in range(200):
            os.pwrite(file.fileno(), bytes(8192), 0)
            os.fdatasync(file.fileno())
        return 200 / (time.perf_counter() - begun)


def on_sqlite(folder: Path) -> None:
    """Measure every journal mode of SQLite."""
    for size, count in BATCHES:
        for mode in MODES:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                store = SqliteStore(Path(place), mode=mode)
                measure(f"SQLite {mode.journal} {mode.locking.lower()}", store, size, count)
                store.close()


def on_postgres(folder: Path) -> None:
    """Measure a PostgreSQL server with synchronous commits."""
    from scripts.test_services import postgres_programs
    from tests.postgres import PostgresServer

    from slicewise.store.postgres import PostgresStore

    programs = postgres_programs()
    if programs is None:
        print("PostgreSQL is not installed")
        return
    server = PostgresServer(programs, durable=True)
    server.start()
    try:
        for size, count in BATCHES:
            store = PostgresStore(server.database())
            measure("PostgreSQL", store, size, count)
            store.close()
    finally:
        server.destroy()


def keeping(folder: Path) -> None:
    """Measure backup and restore of a hundred thousand rows."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        here, there, file = Path(place) / "a", Path(place) / "b", Path(place) / "backup"
        here.mkdir()
        there.mkdir()
        store = SqliteStore(here)
        epoch = store.lead("bench", "", 3600)
        assert epoch is not None
        for rows, answers in batches(1000, 100):
            store.append(epoch, rows, answers)
        begun = time.perf_counter()
        count = backup(store, file)
        made = time.perf_counter()
        store.close()
        other = SqliteStore(there)
        again = time.perf_counter()
        restore(file, other)
        done = time.perf_counter()
        other.close()
        print(
            f"backup {count / (made - begun):,.0f} rows/s, "
            f"{file.stat().st_size / count:.0f} bytes a row with its answer; "
            f"restore {count / (done - again):,.0f} rows/s"
        )


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="on a real disk")
    folder = parser.parse_args().folder
    print(f"{syncs_per_second(folder):.0f} syncs/s of 8 KiB")
    on_sqlite(folder)
    on_postgres(folder)
    keeping(folder)


if __name__ == "__main__":
    main()
