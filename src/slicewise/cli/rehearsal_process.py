"""The process that rehearses for a service: one job on standard input, the result on output."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
from collections.abc import Awaitable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slicewise.runtime.rehearsals import Rehearse

_CACHE = "cache"
"""The folder, in that of the service, for compiled loops: the package's own may be read-only."""


def rehearse_with(folder: Path | None) -> Rehearse | None:
    """Return the way to rehearse for a service with this data folder; None without numba."""
    if find_spec("numba") is None:
        return None
    from slicewise.runtime.background_process import compute
    from slicewise.runtime.rehearsals import LIMIT_SECONDS

    def rehearse(job: bytes) -> Awaitable[bytes]:
        command = [sys.executable, "-m", __name__]
        if "NUMBA_CACHE_DIR" not in os.environ:
            command.append(str(_own_folder() if folder is None else (folder / _CACHE).absolute()))
        return compute(command, job, LIMIT_SECONDS)

    return rehearse


@cache
def _own_folder() -> Path:
    """Return a temporary folder of this process; others must not be able to write to it."""
    from slicewise.runtime.background_process import BackgroundError

    try:
        made = Path(mkdtemp(prefix="slicewise-"))
    except OSError as error:  # everything is mounted read-only
        raise BackgroundError(f"has no folder for compiled loops: {error}") from None
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _work(job: bytes) -> bytes:
    from slicewise.control.rehearsal_job import decode_job, encode_result
    from slicewise.lab.rehearsal import rehearse

    decoded = decode_job(job)
    return encode_result(rehearse(decoded.estimate, decoded.cluster, decoded.in_force))


def main() -> None:
    """Read the job, rehearse, and write the result."""
    from slicewise.runtime.background_process import answer

    if len(sys.argv) > 1:
        os.environ["NUMBA_CACHE_DIR"] = sys.argv[1]
    answer(_work)


if __name__ == "__main__":
    main()
