"""``python -m slicewise.demo.agent_process PARENT ...``: an agent that exits with its parent.

The kernel terminates it when its parent ends, however that happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from slicewise.agent.__main__ import main

_PR_SET_PDEATHSIG = 1


def exit_with(parent: int) -> bool:
    """End this process when its parent ends; False if the parent is gone already."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux only
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]) if exit_with(int(sys.argv[1])) else 0)
