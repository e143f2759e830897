"""A killed process loses no acknowledged commit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.conftest import Destination

from slicewise.store import verify

CYCLES = 5

# Writes batches forever, and prints its position after every commit.
WRITE = """
import random
import sys
from pathlib import Path
from slicewise.control.snapshot import snapshot_of
from slicewise.runtime.commit_loop import load
from slicewise.store import open_store
from tests.store.busy import Busy

data, database, seed = sys.argv[1:]
store = open_store(Path(data) if data else None, database or None)
epoch = store.lead("child", "", 0)
busy, chance = Busy(int(seed)), random.Random()
state = load(store, busy.office.fresh())
written, given = state.seq, 0
if written:
    # The same seed does the same work, so it can go on where the last process was killed.
    busy.work(written)
    assert store.rows(0, 1_000_000) == busy.office.rows[:written]
    given = len(busy.answers)
while True:
    rows = busy.office.rows[written:]
    store.append(epoch, rows, busy.answers[given:])
    written, given = written + len(rows), len(busy.answers)
    if chance.random() < 0.2:
        store.save_snapshot(snapshot_of(busy.office.state))
    print(written, flush=True)
    busy.work(written + chance.randrange(1, 30))
"""


def test_no_acknowledged_commit_is_lost(home: Destination) -> None:
    root = Path(__file__).parents[2]
    chance = random.Random(7)
    said = 0
    for _ in range(CYCLES):
        with subprocess.Popen(
            [sys.executable, "-c", WRITE, str(home.data or ""), home.database or "", "11"],
            stdout=subprocess.PIPE,
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
            text=True,
        ) as child:
            assert child.stdout is not None
            for _ in range(chance.randrange(2, 40)):
                line = child.stdout.readline()
                if not line:
                    pytest.fail("the writer ended by itself")
                said = int(line)
            child.send_signal(signal.SIGKILL)
        store = home.open()
        assert store.last_seq() >= said
        report = verify(store)
        assert report.findings == []
        assert report.rows >= said
        store.close()
