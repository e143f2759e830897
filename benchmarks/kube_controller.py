"""Run the controller as `slicewise k8s` does, and report its statistics.

    python -m benchmarks.kube_controller KUBECONFIG REPORT [--profile FILE]

On SIGTERM it exits and writes its statistics, memory and CPU time to REPORT. SIGUSR1 writes the
report without exiting.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import json
import logging
import pstats
import resource
import signal
import time
from pathlib import Path
from typing import Any

from slicewise.kubernetes.api_client import ApiClient
from slicewise.kubernetes.controller import Controller, ControllerOptions


def report(controller: Controller, began: float) -> dict[str, Any]:
    """Return the controller's statistics so far."""
    status = Path("/proc/self/status").read_text()
    memory = {
        name: int(line.split()[1]) / 1024
        for line in status.splitlines()
        for name in ("VmRSS", "VmHWM")
        if line.startswith(name)
    }
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        **dataclasses.asdict(controller.stats),
        "rss_mib": memory["VmRSS"],
        "peak_mib": memory["VmHWM"],
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "seconds": time.monotonic() - began,
        "waiting": controller.waiting,
    }


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kubeconfig", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("--profile", type=Path, help="profile the deciding thread into this file")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    began = time.monotonic()
    controller = Controller(
        ApiClient.open(options.kubeconfig),
        ControllerOptions(
            namespace="default", identity="benchmark", lease_seconds=15.0, hold_back="never"
        ),
    )

    def write(*_: object) -> None:
        text = json.dumps(report(controller, began))
        draft = options.report.with_suffix(".draft")
        draft.write_text(text)
        draft.rename(options.report)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: controller.stop())
    signal.signal(signal.SIGUSR1, write)
    if options.profile is None:
        controller.run()
    else:
        profile = cProfile.Profile()
        profile.runcall(controller.run)
        with options.profile.open("w") as out:
            pstats.Stats(profile, stream=out).sort_stats("cumulative").print_stats(60)
            pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(40)
    write()


if __name__ == "__main__":
    main()
