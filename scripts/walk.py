"""Measure the path of three operations through the sources, by running them.

Usage: python scripts/walk.py [--json]

The operations are a POST /v1/allocations over a socket to a service with a SQLite store, one
Kubernetes claim on the fake API of the unit tests, and one small `slicewise simulate`. Each runs
several times; imports and one-time work happen in the first run, which does not count. Of the
other runs the one with the fewest files is reported, since timers of the service may interleave.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import logging
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = f"{ROOT / 'src' / 'slicewise'}/"
RUNS = 7


class Recorder:
    """Records calls of functions in src/slicewise by file and thread."""

    def __init__(self) -> None:
        self.on = False
        self._calls: list[tuple[int, str]] = []

    def install(self) -> None:
        """Profile this thread and every thread started later."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call":
            file = frame.f_code.co_filename
            if file.startswith(SOURCES):
                self._calls.append((threading.get_ident(), file.removeprefix(SOURCES)))

    def start(self) -> None:
        """Begin a recording."""
        self._calls = []
        self.on = True

    def stop(self) -> dict[str, Any]:
        """End the recording and summarize it."""
        self.on = False
        calls = self._calls
        files = list(dict.fromkeys(file for _, file in calls))
        pairs = list(itertools.pairwise(calls))
        return {
            "files": len(files),
            "changes_of_file": sum(a[1] != b[1] for a, b in pairs),
            "thread_switches": sum(a[0] != b[0] for a, b in pairs),
            "path": files,
        }


def shortest(walks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the fewest files, then the fewest thread switches and file changes."""
    order = ("files", "thread_switches", "changes_of_file")
    return min(walks[1:], key=lambda walk: [walk[name] for name in order])


def post(recorder: Recorder) -> dict[str, Any]:
    """POST /v1/allocations to a service in this process, over a socket."""
    from slicewise.config.settings import Settings
    from slicewise.config.values import Address
    from slicewise.server.server import listening, serve
    from slicewise.server.service import Service
    from slicewise.store import open_store

    logging.disable(logging.CRITICAL)

    async def run(folder: Path) -> list[dict[str, Any]]:
        settings = Settings(data=folder)
        store = open_store(folder)
        listener = listening(Address("127.0.0.1", 0))
        host, port = listener.getsockname()
        ready = asyncio.Event()
        serving = asyncio.create_task(
            serve(Service(store, settings), listener, lambda url: ready.set())
        )
        await asyncio.wait_for(ready.wait(), 60)
        token = (folder / "admin-token").read_text().strip()
        reader, writer = await asyncio.open_connection(host, port)

        async def ask(path: str, body: object) -> None:
            content = json.dumps(body).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nhost: walk\r\nauthorization: Bearer {token}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            )
            writer.write(head.encode() + content)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            length = answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
            text = await asyncio.wait_for(reader.readexactly(int(length)), 60)
            if not answer.startswith(b"HTTP/1.1 201"):
                raise SystemExit(f"unexpected answer: {(answer + text).decode()}")

        await ask("/v1/nodes", {"name": "n1", "model": "A100-80GB", "gpus": 8})
        walks = []
        for _ in range(RUNS):
            await asyncio.sleep(0.03)
            recorder.start()
            await ask("/v1/allocations", {"profile": "1g.10gb"})
            walks.append(recorder.stop())
        writer.close()
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        store.close()
        return walks

    with tempfile.TemporaryDirectory() as folder:
        return shortest(asyncio.run(run(Path(folder))))


def claim(recorder: Recorder) -> dict[str, Any]:
    """One Kubernetes claim: from the pod's appearance to the written allocation."""
    from tests.kubernetes.actors import PROFILES, TEAM, end_pod, make_pod
    from tests.kubernetes.simulation import Simulation

    from slicewise.kubernetes.informer import CLAIMS

    simulation = Simulation(b"")
    replica = simulation.replicas[0]
    replica.controller.elector.beat()
    simulation._busy(replica)
    walks = []
    for number in range(RUNS):
        make_pod(simulation.api, f"p{number}", [PROFILES[0]], [])
        for _ in range(2):  # first creates the claim, then adds it to the pod's status
            simulation.claim_controller.see_to_pod(f"{TEAM}/p{number}")
        recorder.start()
        simulation._busy(replica)
        walks.append(recorder.stop())
        claims = simulation.api.there[CLAIMS.name]
        if not all(one["status"].get("allocation") for one in claims.values()):
            raise SystemExit("the claim was not allocated")
        end_pod(simulation.api, f"{TEAM}/p{number}", False)
        for _ in range(9):
            for key in list(claims):
                simulation.claim_controller.see_to_claim(key)
            simulation._busy(replica)
    replica.end()
    return shortest(walks)


def simulate(recorder: Recorder) -> dict[str, Any]:
    """One small `slicewise simulate`."""
    from slicewise.cli.main import exit_status

    walks = []
    for _ in range(3):
        recorder.start()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = exit_status(
                ["simulate", "--gpus", "8", "--runs", "1", "--workers", "1", "--policy", "mfi"]
            )
        walks.append(recorder.stop())
        if status:
            raise SystemExit(f"simulate exited with {status}")
    return shortest(walks)


OPERATIONS: dict[str, Callable[[Recorder], dict[str, Any]]] = {
    "POST /v1/allocations": post,
    "Kubernetes claim": claim,
    "simulate": simulate,
}


def main() -> None:
    """Run the operations and print their paths."""
    parser = argparse.ArgumentParser(description="Print the files that operations cross.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    recorder = Recorder()
    recorder.install()
    walks = {name: operation(recorder) for name, operation in OPERATIONS.items()}
    sys.setprofile(None)
    threading.setprofile(None)
    if options.json:
        print(json.dumps(walks, indent=2))
        return
    for name, walk in walks.items():
        print(
            f"{name}: {walk['files']} files, {walk['changes_of_file']} changes of file, "
            f"{walk['thread_switches']} thread switches"
        )
        for file in walk["path"]:
            print(f"  {file}")


if __name__ == "__main__":
    main()
