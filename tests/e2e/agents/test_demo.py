"""`slicewise demo --agents`: real agents on simulated nodes."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.conftest import Tell
from tests.e2e.server import PATIENCE_SECONDS

from slicewise.client import Client
from slicewise.demo.agents import AgentProcesses, InstancePhases
from slicewise.demo.cluster import NODES
from slicewise.fakedriver import Machine
from slicewise.journal.agent_entries import PartTurned

OPTIONS = ("--listen", "127.0.0.1:0", "--rate", "8", "--hold", "2")


def launch(folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    """Start the demonstration as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", "slicewise.cli", "demo", "--data", "demo", *options],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def running(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running demonstration and its URL."""
    demo = launch(folder, *OPTIONS, *options)
    try:
        assert demo.stdout is not None
        printed = ""
        for line in demo.stdout:
            printed += line
            if "Ctrl-C ends it" in line:
                break
        found = re.search("slicewise is at (.*)", printed)
        assert found, printed + "".join(demo.stderr or [])
        yield demo, found[1]
    finally:
        demo.kill()
        demo.communicate()


def agents_of(folder: Path) -> list[int]:
    """The ids of agent processes with this folder."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "slicewise.demo.agent_process" in words and any(
                w.startswith(str(folder)) for w in words
            ):
                found.append(int(path.name))
    return found


def until_none(folder: Path) -> None:
    """Wait until all agents have exited."""
    give_up = time.monotonic() + PATIENCE_SECONDS
    while agents_of(folder):
        assert time.monotonic() < give_up, agents_of(folder)
        time.sleep(0.02)


def test_agents_create_instances_and_exit_with_the_demo(tmp_path: Path, tell: Tell) -> None:
    folder = tmp_path / "demo"
    with running(tmp_path, "--agents") as (demo, url):
        assert len(agents_of(folder)) == len(NODES)
        token = folder / "admin-token"
        phases = InstancePhases()
        with Client(url, token.read_text().strip()) as admin:
            nodes = list(admin.nodes())
            assert all(node.managed for node in nodes)
            assert [(n.name, n.model, n.gpus) for n in nodes] == sorted(NODES)
            for event in admin.events(0):
                if isinstance(event.entry, PartTurned):
                    entry = event.entry
                    phases.record((entry.allocation, entry.index), str(entry.phase))
                if min(phases.ever[phase] for phase in ("creating", "active", "gone")) >= 3:
                    break
        listed = ""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not {"active", "creating"} & set(listed.split()):
            assert time.monotonic() < give_up, listed
            done = subprocess.run(
                [sys.executable, "-m", "slicewise.cli", "ls"],
                env=os.environ | {"SLICEWISE_SERVER": url, "SLICEWISE_TOKEN_FILE": str(token)},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            listed = done.stdout
        machines = [Machine(folder / "agents" / name / "machine") for name, _, _ in NODES]
        while not any(machine.instances() for machine in machines):
            assert time.monotonic() < give_up, "no instances on the simulated GPUs"
            time.sleep(0.02)
        demo.send_signal(signal.SIGINT)
        out, err = demo.communicate()
        assert (demo.returncode, err) == (0, "")
        assert agents_of(folder) == []
    requests, instances = out.splitlines()[-2:]
    assert re.search(r"^\d+ requests: .*\d+ placed", requests)
    assert re.search(r"^instances: .*; so far \d+ creating, \d+ active, \d+ gone$", instances)
    tell(f"{requests}; {instances}")

    # A killed demonstration leaves no agents, and can be restarted with its data.
    with running(tmp_path, "--agents") as (demo, _):
        assert len(agents_of(folder)) == len(NODES)
        demo.kill()
        demo.wait()
        until_none(folder)
    with running(tmp_path, "--agents", "--requests", "3") as (demo, _):
        out, err = demo.communicate()
        assert (demo.returncode, err) == (0, "")
        assert agents_of(folder) == []
    plain = launch(tmp_path, *OPTIONS)
    out, err = plain.communicate()
    assert (plain.returncode, out) == (2, "")
    assert err.startswith("slicewise: error: this demonstration was run with --agents")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("options", [[], ["--agents"]])
def test_missing_compiler(options: list[str], tmp_path: Path) -> None:
    """Only agents need a compiler; the error is one line."""
    demo = launch(tmp_path, *OPTIONS, "--requests", "1", *options, CC="no-such-compiler")
    _, err = demo.communicate()
    if not options:
        assert (demo.returncode, err) == (0, "")
        return
    assert demo.returncode == 2
    assert err.startswith(
        "slicewise: error: the fake driver needs a C compiler, but no-such-compiler was not found"
    )
    assert len(err.splitlines()) == 1


def test_restart_of_an_agent_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ended:
        async def wait(self) -> int:
            return 1

    attempts: list[str] = []

    async def start_again(name: str, url: str) -> None:
        attempts.append(name)
        if len(attempts) == 1:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        raise asyncio.CancelledError

    fleet = object.__new__(AgentProcesses)
    fleet._processes = {"n": Ended()}  # type: ignore[dict-item]
    monkeypatch.setattr(fleet, "_launch", start_again)
    monkeypatch.setattr("slicewise.demo.agents._RESTART_SECONDS", 0.0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(fleet._restart("n", "http://x"))
    assert attempts == ["n", "n"]


def test_summary_of_instance_phases() -> None:
    phases = InstancePhases()
    assert phases.summary() == "instances: none; so far 0 creating, 0 active, 0 gone"
    for phase in ("creating", "creating", "active"):
        phases.record(("a", 0), phase)
    phases.record(("b", 0), "creating")
    phases.record(("c", 0), "gone")
    assert phases.summary() == (
        "instances: 1 creating, 1 active; so far 2 creating, 1 active, 1 gone"
    )
