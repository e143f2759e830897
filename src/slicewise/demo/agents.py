"""Real agents for the nodes of the demonstration, on a fake driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from pathlib import Path

from slicewise.agent.exclusivity import MANAGERS
from slicewise.client import AsyncClient, Role
from slicewise.core.errors import SlicewiseError
from slicewise.demo.cluster import NODES, NOTE
from slicewise.fakedriver import Machine, build
from slicewise.journal.agent_entries import PartTurned

_POLL_SECONDS = 0.1
_RESTART_SECONDS = 1.0
"""The delay before an agent that exited is restarted."""
_STOP_SECONDS = 10.0
"""The time that agents have to exit before they are killed."""
_SLOW = {
    "nvmlDeviceCreateGpuInstanceWithPlacement": 120,
    "nvmlGpuInstanceCreateComputeInstance": 80,
    "nvmlGpuInstanceDestroy": 80,
}
"""Delays of driver calls in milliseconds, which make the phases visible."""


class AgentProcesses:
    """An agent process for each node, each with its own fake machine."""

    def __init__(self, folder: Path) -> None:
        """Build the driver and the machines; raises SlicewiseError without a C compiler."""
        self._folder = folder
        self._library = build(folder / "driver").absolute()
        self._machines = {
            name: _machine(folder / name, model, gpus, seed)
            for seed, (name, model, gpus) in enumerate(NODES, 1)
        }
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._restarting: set[asyncio.Task[None]] = set()

    async def start(self, url: str, admin: AsyncClient) -> None:
        """Start the agents, and wait until all nodes are registered."""
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
                self._check_running(name)
            await asyncio.sleep(_POLL_SECONDS)
            missing -= {node.name async for node in admin.nodes() if node.managed}
        for name in self._machines:
            self._restarting.add(asyncio.create_task(self._restart(name, url)))

    async def stop(self) -> None:
        """Stop all agents; the machines are files, and keep their instances."""
        for task in self._restarting:
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        running = [one for one in self._processes.values() if one.returncode is None]
        for process in running:
            process.terminate()
        ends = [asyncio.ensure_future(process.wait()) for process in running]
        if ends:
            await asyncio.wait(ends, timeout=_STOP_SECONDS)
        for process in running:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _launch(self, name: str, url: str) -> None:
        home = self._folder / name
        command = [sys.executable, "-m", "slicewise.demo.agent_process", str(os.getpid())]
        command += ["--server", url, "--token-file", str(home / "token")]
        command += ["--state", str(home / "state"), "--cdi", str(home / "cdi")]
        for manager in MANAGERS:  # those of the host do not manage these GPUs
            command += ["--ignore-manager", manager]
        variables = os.environ | self._machines[name].environment(self._library)
        with (home / "log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                # Ctrl-C goes to the demonstration, which stops its agents in order.
                start_new_session=True,
            )

    async def _restart(self, name: str, url: str) -> None:
        """Restart an agent that exits, as a service manager does."""
        while True:
            await self._processes[name].wait()
            await asyncio.sleep(_RESTART_SECONDS)
            with contextlib.suppress(OSError):  # such as too many processes: try again
                await self._launch(name, url)

    def _check_running(self, name: str) -> None:
        if self._processes[name].returncode is None:
            return
        log = self._folder / name / "log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = lines[-1].removeprefix("slicewise: error: ") if lines else "no log"
        raise SlicewiseError(f"the agent of {name} exited: {said}")


class InstancePhases:
    """The phases of all instances, from the events of the service."""

    def __init__(self) -> None:
        self.now: dict[tuple[str, int], str] = {}
        """The phase of each existing instance."""
        self.ever: Counter[str] = Counter()
        """How many instances have reached each phase."""

    async def follow(self, admin: AsyncClient) -> None:
        """Follow the events until cancelled."""
        async for event in admin.events(0):
            entry = event.entry
            if isinstance(entry, PartTurned):
                self.record((entry.allocation, entry.index), str(entry.phase))

    def record(self, instance: tuple[str, int], phase: str) -> None:
        """Record the phase of an instance."""
        if self.now.get(instance) != phase:
            self.ever[phase] += 1
        if phase == "gone":
            self.now.pop(instance, None)
        else:
            self.now[instance] = phase

    def summary(self) -> str:
        """A summary in one line."""
        now = Counter(self.now.values())
        order = ("creating", "active", "releasing", "quarantined")
        there = ", ".join(f"{now[phase]} {phase}" for phase in order if now[phase]) or "none"
        return (
            f"instances: {there}; so far {self.ever['creating']} creating, "
            f"{self.ever['active']} active, {self.ever['gone']} gone"
        )


def _machine(folder: Path, model: str, gpus: int, seed: int) -> Machine:
    """The machine of a node: the one of the last run, or a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "machine").absolute()
    try:
        machine = Machine(path)
    except SlicewiseError:  # missing, or of another version
        machine = Machine.create(path, model, gpus, seed=seed)
    machine.clear_faults()
    for function, milliseconds in _SLOW.items():
        machine.delay(function, milliseconds)
    return machine
