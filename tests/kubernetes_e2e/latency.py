"""How long pods take from their creation to running, through the whole chain on one node.

Usage: python -m tests.kubernetes_e2e.latency [--rounds N] [--batch N] [--half] [--json FILE]
                                              [-- FLAGS OF slicewise k8s]

In each round a batch of pods is created at once, and deleted when all run. Rounds of the stock
allocator and of slicewise alternate on the same node, which is a real one, or with ``--half`` one
without containers. All pods of a round fit, so none waits for another to end.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles

from tests.kubernetes_e2e.api import until
from tests.kubernetes_e2e.chain import PROFILES, Chain, chain
from tests.kubernetes_e2e.cluster import namespace, pods_in
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import Replica

from slicewise.fakedriver import build

SIDES = {"stock": "stock-", "slicewise": ""}
"""The allocators, and the prefix of their templates."""
_GPUS = 4
_LOOK_SECONDS = 0.01
PERCENTS = (50, 90, 99)


def play(there: Chain, space: str, titles: Sequence[str]) -> list[float]:
    """Create pods at once, wait until they run, and delete them; the seconds that each took."""
    api, path = there.api, pods_in(space)
    created: dict[str, float] = {}
    for number, title in enumerate(titles):
        name = f"p{number}"
        there.make_pod(space, name, title)
        created[name] = time.monotonic()
    took: dict[str, float] = {}

    def all_run() -> bool:
        while len(took) < len(created):
            found = api.items(f"{path}?resourceVersion=0")
            now = time.monotonic()
            for one in found:
                name = one["metadata"]["name"]
                if one["status"].get("phase") == "Running":
                    took.setdefault(name, now - created[name])
            time.sleep(_LOOK_SECONDS)
            if now - max(created.values()) > 1:
                break
        return len(took) == len(created)

    until("the pods run", all_run)
    for name in created:
        api.delete(f"{path}/{name}")
    until("the pods are gone", lambda: not api.items(path) or None)
    there.until_places()
    return list(took.values())


def measure(there: Chain, space: str, rounds: int, batch: int) -> dict[str, dict[str, float]]:
    """The quantiles of both allocators, in seconds."""
    chance = random.Random(0)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        # Four of the smallest fit on a GPU beside each other, whoever places them.
        titles = chance.choices(list(PROFILES), [5, 3, 2], k=batch)
        for side, prefix in SIDES.items():
            seconds[side] += play(there, space, [prefix + title for title in titles])
    return {
        side: {
            str(percent): round(quantiles(found, n=100, method="inclusive")[percent - 1], 2)
            for percent in PERCENTS
        }
        for side, found in seconds.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes_e2e.latency")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--half", action="store_true", help="without containers")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("flags", nargs="*", help="flags of slicewise k8s")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then, too
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sw-")))
        plane = stack.enter_context(Plane())
        library = build(folder / "library")
        there = stack.enter_context(chain(plane, library, folder, real=not chosen.half, gpus=_GPUS))
        space = stack.enter_context(namespace(plane.api))
        there.make_templates(space)
        replica = Replica(plane.kubeconfig, folder, *chosen.flags)
        replica.start()
        stack.callback(replica.kill)
        play(there, space, ["one"])  # until slicewise leads
        play(there, space, ["stock-one"])
        found = measure(there, space, chosen.rounds, chosen.batch)
    print(f"{chosen.rounds} rounds of {chosen.batch} pods; creation to running, seconds")
    print("| allocator | " + " | ".join(f"{percent}%" for percent in PERCENTS) + " |")
    for side, one in found.items():
        print(f"| {side} | " + " | ".join(f"{value:.2f}" for value in one.values()) + " |")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
