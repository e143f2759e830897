"""A child process that computes in the background: it reads one job, writes one result and ends.

The child has the lowest priority. It ends with its parent, however that ends, and within its time
limit, however badly it hangs. What it prints beside the result goes to its standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from slicewise.core.errors import SlicewiseError

MAX_RESULT_BYTES = 1 << 20
MAX_MEMORY_BYTES = 4 << 30
_MAX_MESSAGE_BYTES = 1 << 16
_SHOWN_CHARACTERS = 300
_PIECE = 1 << 16
_PR_SET_PDEATHSIG = 1
_ONE_THREAD = dict.fromkeys(
    ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
"""A child computes in one thread, so its time is the time of one core."""


class BackgroundError(SlicewiseError):
    """Raised when a child process fails; the message says how."""


async def compute(command: Sequence[str], job: bytes, seconds: float) -> bytes:
    """Run a command that calls `answer`, and return its result.

    A child that is not done after ``seconds`` is killed, and so is one whose caller is cancelled.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(),
        )
    except OSError as error:
        raise BackgroundError(f"cannot be started: {error.strerror or error}") from None
    try:
        async with asyncio.timeout(seconds):
            result, message = await _exchange(child, job, seconds)
            status = await child.wait()
    except TimeoutError:
        raise BackgroundError(f"was not done after {seconds:g} seconds") from None
    finally:
        await _end(child)
    if status != 0:
        raise BackgroundError(f"{_ending(status)}: {_last_line(message)}")
    return result


async def _exchange(
    child: asyncio.subprocess.Process, job: bytes, seconds: float
) -> tuple[bytes, bytes]:
    """Send the job; return the result and the end of what the child printed.

    The child's input stays open: its end tells the child that its parent is gone.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdin.write(b"%d %d\n" % (len(job), math.ceil(seconds)) + job)
    with suppress(ConnectionError):  # a child that has ended tells why in its message
        await child.stdin.drain()
    async with asyncio.TaskGroup() as both:
        message = both.create_task(_tail(child.stderr))
        result = await _whole(child.stdout)
        if result is None:
            child.kill()
    if result is None:
        raise BackgroundError(f"wrote more than {MAX_RESULT_BYTES:,} bytes")
    return result, message.result()


async def _whole(stream: asyncio.StreamReader) -> bytes | None:
    """Return everything up to the end; None if that is too much."""
    read = b""
    while piece := await stream.read(_PIECE):
        read += piece
        if len(read) > MAX_RESULT_BYTES:
            return None
    return read


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Read to the end, and return the last part."""
    read = b""
    while piece := await stream.read(_PIECE):
        read = (read + piece)[-_MAX_MESSAGE_BYTES:]
    return read


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.returncode is None:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    assert child.stdin is not None
    child.stdin.close()


def _environment() -> dict[str, str]:
    """The environment of a child: without the settings of the service, which have secrets."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLICEWISE_")}
    return kept | _ONE_THREAD


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _last_line(message: bytes) -> str:
    lines = message.decode(errors="replace").split("\n")
    shown = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
    return "".join(c if c.isprintable() else "?" for c in shown)[:_SHOWN_CHARACTERS]


# The child


def answer(work: Callable[[bytes], bytes]) -> None:
    """Read the job from standard input, work on it, and write the result to standard output."""
    parent = os.getppid()
    _end_with_parent(parent)
    _lower_priority()
    size, seconds = map(int, sys.stdin.buffer.readline().split())
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    job = sys.stdin.buffer.read(size)
    threading.Thread(target=_watch_input, daemon=True).start()
    # What libraries print must not get into the result.
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    result = work(job)
    with os.fdopen(output, "wb") as file:
        file.write(result)


def _watch_input() -> None:
    """End this process as soon as its parent is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _end_with_parent(parent: int) -> None:
    """Have Linux kill this process with its parent; elsewhere, `_watch_input` alone must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _lower_priority() -> None:
    """Take the processor and memory only as far as other processes leave them."""
    os.nice(19)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
