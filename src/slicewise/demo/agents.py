"""The nodes of the demonstration run by real agents, on a driver for GPUs that do not exist."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from pathlib import Path

from slicewise.agent.managers import MANAGERS
from slicewise.client import AsyncClient, Role
from slicewise.control.hardware import PartTurned
from slicewise.core.errors import SlicewiseError
from slicewise.demo.scene import NODES, NOTE
from slicewise.fakedriver import Machine, build

_LOOK_SECONDS = 0.1
_AGAIN_SECONDS = 1.0
"""How long an agent that ended by itself is left alone."""
_LAST_SECONDS = 10.0
"""How long agents may take to end before they are ended."""
_SLOW = {
    "nvmlDeviceCreateGpuInstanceWithPlacement": 120,
    "nvmlGpuInstanceCreateComputeInstance": 80,
    "nvmlGpuInstanceDestroy": 80,
}
"""Milliseconds that calls of the driver take, so that there is something to see."""


class Fleet:
    """An agent for each node, each a process of its own with a machine of its own."""

    def __init__(self, folder: Path) -> None:
        """Build the driver and the machines; says in a sentence if there is no C compiler."""
        self._folder = folder
        self._library = build(folder / "driver").absolute()
        self._machines = {
            name: _machine(folder / name, model, gpus, seed)
            for seed, (name, model, gpus) in enumerate(NODES, 1)
        }
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keeping: set[asyncio.Task[None]] = set()

    async def start(self, url: str, admin: AsyncClient) -> None:
        """Start the agents, and wait until the service knows all nodes."""
        old = {t.id async for t in admin.tokens() if t.note == NOTE and t.role == Role.AGENT}
        for name in self._machines:
            issued = await admin.issue_token(Role.AGENT, node=name, note=NOTE)
            token = self._folder / name / "token"
            token.touch(mode=0o600)
            token.write_text(issued.token, encoding="utf-8")
            await self._launch(name, url)
        for identity in old:
            await admin.revoke_token(identity)
        missing = set(self._machines)
        while missing:
            for name in missing:
                self._insist(name)
            await asyncio.sleep(_LOOK_SECONDS)
            missing -= {node.name async for node in admin.nodes() if node.managed}
        for name in self._machines:
            self._keeping.add(asyncio.create_task(self._keep(name, url)))

    async def stop(self) -> None:
        """End all agents; the instances stay as they are, on machines that are files."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        running = [one for one in self._processes.values() if one.returncode is None]
        for process in running:
            process.terminate()
        ends = [asyncio.ensure_future(process.wait()) for process in running]
        if ends:
            await asyncio.wait(ends, timeout=_LAST_SECONDS)
        for process in running:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _launch(self, name: str, url: str) -> None:
        home = self._folder / name
        command = [sys.executable, "-m", "slicewise.demo.tied", str(os.getpid())]
        command += ["--server", url, "--token-file", str(home / "token")]
        command += ["--state", str(home / "state"), "--cdi", str(home / "cdi")]
        for manager in MANAGERS:  # it is none of theirs that is managed here
            command += ["--ignore-manager", manager]
        variables = os.environ | self._machines[name].environment(self._library)
        with (home / "log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                # Ctrl-C is for the demonstration, which then ends its agents in order.
                start_new_session=True,
            )

    async def _keep(self, name: str, url: str) -> None:
        """Start an agent again that ended by itself, as a service manager does."""
        while True:
            await self._processes[name].wait()
            await asyncio.sleep(_AGAIN_SECONDS)
            with contextlib.suppress(OSError):  # no process to be had, say: once more
                await self._launch(name, url)

    def _insist(self, name: str) -> None:
        if self._processes[name].returncode is None:
            return
        log = self._folder / name / "log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = lines[-1].removeprefix("slicewise: error: ") if lines else "it said nothing"
        raise SlicewiseError(f"the agent of {name} has ended: {said}")


class Stages:
    """How far the instances have come, by what the service tells."""

    def __init__(self) -> None:
        self.now: dict[tuple[str, int], str] = {}
        """By instance that is there: its phase."""
        self.ever: Counter[str] = Counter()
        """How many came to each phase."""

    async def follow(self, admin: AsyncClient) -> None:
        """Listen for ever."""
        async for event in admin.events(0):
            entry = event.entry
            if isinstance(entry, PartTurned):
                self.take((entry.allocation, entry.index), str(entry.phase))

    def take(self, instance: tuple[str, int], phase: str) -> None:
        """An instance has come to a phase, or something else about it is new."""
        if self.now.get(instance) != phase:
            self.ever[phase] += 1
        if phase == "gone":
            self.now.pop(instance, None)
        else:
            self.now[instance] = phase

    def summary(self) -> str:
        """All of it in a line."""
        now = Counter(self.now.values())
        order = ("creating", "active", "releasing", "quarantined")
        there = ", ".join(f"{now[phase]} {phase}" for phase in order if now[phase]) or "none"
        return (
            f"instances: {there}; so far {self.ever['creating']} creating, "
            f"{self.ever['active']} active, {self.ever['gone']} gone"
        )


def _machine(folder: Path, model: str, gpus: int, seed: int) -> Machine:
    """The machine of a node, as the last demonstration left it, or a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "machine").absolute()
    try:
        machine = Machine(path)
    except SlicewiseError:  # there is none yet, or one of another version
        machine = Machine.create(path, model, gpus, seed=seed)
    machine.heal()
    for function, milliseconds in _SLOW.items():
        machine.delay(function, milliseconds)
    return machine
