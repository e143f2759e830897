"""``python -m slicewise.demo.tied PARENT ...``: an agent that ends with the demonstration.

An agent of a real node outlives whatever started it. This one is of no use by itself, so that the
kernel is asked to end it with its parent, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from slicewise.agent.__main__ import main

_PR_SET_PDEATHSIG = 1


def tie(parent: int) -> bool:
    """Have this process end with its parent; False where that is gone already."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # elsewhere than on Linux there is none
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]) if tie(int(sys.argv[1])) else 0)
