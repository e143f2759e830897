"""A background process: its result, its limits, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slicewise.runtime import background_process
from slicewise.runtime.background_process import BackgroundError, compute

_CHILD = "from slicewise.runtime.background_process import answer\n"


def _python(work: str, before: str = "") -> list[str]:
    """A command whose work is an expression of the job."""
    return [sys.executable, "-c", f"{_CHILD}{before}\nanswer(lambda job: {work})"]


def _run(command: list[str], job: bytes = b"", seconds: float = 60) -> bytes:
    return asyncio.run(compute(command, job, seconds))


def _gone(pid: int) -> bool:
    """Whether a process has ended; one that its new parent has not collected has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def _wait_until_gone(pid: int) -> None:
    while not _gone(pid):
        time.sleep(0.01)


def test_the_result_comes_back_whole() -> None:
    job = bytes(range(256)) * 2000
    assert _run(_python("job[::-1]"), job) == job[::-1]


def test_what_a_library_prints_is_not_part_of_the_result() -> None:
    assert _run(_python("print('warming up') or os.write(1, b'x') and job", "import os"), b"1") == (
        b"1"
    )


def test_the_child_has_the_lowest_priority_one_thread_and_no_settings_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLICEWISE_DATABASE", "postgresql://user:secret@host/db")
    found = _run(
        _python(
            "repr((os.getpriority(os.PRIO_PROCESS, 0), os.environ['NUMBA_NUM_THREADS'],"
            " [n for n in os.environ if n.startswith('SLICEWISE_')],"
            " os.sched_getscheduler(0) == os.SCHED_IDLE)).encode()",
            "import os",
        )
    )
    assert found == b"(19, '1', [], True)"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["/no/such/program"], "cannot be started: No such file or directory"),
        (_python("1 / 0"), "ended with status 1: ZeroDivisionError: division by zero"),
        (_python("os.abort()", "import os"), "was ended by SIGABRT: "),
        (_python("os.kill(os.getpid(), 50)", "import os"), "was ended by signal 50: no message"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with status 3: no message"),
        (_python("bytearray(5 << 30)"), "ended with status 1: MemoryError"),
        (_python("b'x' * (1 << 21)"), "wrote more than 1,048,576 bytes"),
        (
            _python(r"sys.exit('bad \x1b[2J news ' + 'x' * 1000)", "import sys"),
            "ended with status 1: bad ?[2J news xxx",
        ),
    ],
)
def test_a_child_that_fails_is_an_error_with_its_last_words(
    command: list[str], message: str
) -> None:
    with pytest.raises(BackgroundError) as error:
        _run(command, b"x" * (1 << 20))
    assert str(error.value).startswith(message)
    assert len(str(error.value)) < 400


def test_a_child_that_hangs_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = _python(
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid())) and time.sleep(1000)",
        "import os, pathlib, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)",
    )

    async def hang() -> None:
        task = asyncio.create_task(compute(command, b"", 5))
        while not note.exists():
            await asyncio.sleep(0.01)
        await task

    with pytest.raises(BackgroundError, match=r"was not done after 5 seconds"):
        asyncio.run(hang())
    assert _gone(int(note.read_text()))


def test_a_child_that_computes_for_too_long_ends_even_without_its_parent() -> None:
    child = subprocess.Popen(
        _python("[0 for _ in iter(int, 1)]"), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdin is not None
    child.stdin.write(b"0 1\n")
    child.stdin.flush()
    assert child.wait() in (-signal.SIGXCPU, -signal.SIGKILL)
    child.stdin.close()


def test_the_child_of_a_cancelled_call_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = _python(
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid())) and time.sleep(1000)",
        "import os, pathlib, time",
    )

    async def cancel() -> None:
        task = asyncio.create_task(compute(command, b"", 1000))
        while not note.exists() or not note.read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert _gone(int(note.read_text()))


@pytest.mark.parametrize("by_input_only", [False, True])
def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path, by_input_only: bool) -> None:
    note = tmp_path / "pid"
    child = _python(
        f"pathlib.Path({str(note)!r}).write_text(str(os.getpid())) and time.sleep(1000)",
        "import os, pathlib, sys, time" + ("\nsys.platform = 'other'" if by_input_only else ""),
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio\nfrom slicewise.runtime.background_process import compute\n"
            f"asyncio.run(compute({child!r}, b'', 1000))",
        ]
    )
    while not note.exists() or not note.read_text():
        time.sleep(0.01)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    _wait_until_gone(int(note.read_text()))


def test_a_child_whose_parent_is_gone_at_once_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: _NoLibrary())
    background_process._end_with_parent(os.getppid() + 1)
    assert ended == [1]


class _NoLibrary:
    def prctl(self, option: int, value: int) -> int:
        return 0
