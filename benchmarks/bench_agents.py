"""Measure the latency from an allocation to an active instance, and the cost of idle agents.

Starts a real `slicewise serve` on SQLite and one real agent process per node (`python -m
slicewise.agent`), each on its own machine of the fake driver. The fake driver answers immediately,
so the figures are those of slicewise, not of GPUs. One run measures:

- idle: requests per agent and minute, and the CPU use of server and agents;
- latency from the request until the instance is active, observed on the event stream, with several
  concurrent clients that each release their instance and wait until it is gone;
- the reference: the same requests on as many GPUs of nodes without agents, where an allocation is
  complete when it is answered.

`--agents N` sets the number of agents, `--quick` takes two minutes at most, `--json` prints all
figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slicewise.client import AsyncClient, Client
from slicewise.fakedriver import Machine, build
from slicewise.journal.agent_entries import PartTurned, Phase
from slicewise.journal.entries import Role

MODEL, PROFILE = "H200-141GB", "1g.18gb"
PLAIN_MODEL, PLAIN_PROFILE = "A100-80GB", "1g.10gb"
"""Nodes without agents have another model, which keeps the two kinds of requests apart."""
GPUS = 8
TICK = os.sysconf("SC_CLK_TCK")
_AT_ONCE = 8
"""Agents started before waiting for them; more would only compete for the cores."""


# Processes


class Server:
    """A service process."""

    def __init__(self, folder: Path, policy: str) -> None:
        settings = ("limits.requests_per_second=1000000", "log.level=warning", f"policy={policy}")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "slicewise.cli", "serve", "--data", str(folder)),
                *("--listen", "127.0.0.1:0"),
                *(word for setting in settings for word in ("--set", setting)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        found = re.search(r"http://[0-9.:]+", self._process.stdout.readline())
        if found is None:
            raise SystemExit("the server did not start")
        self.url = found[0].rstrip(":")
        self.token = (folder / "admin-token").read_text().strip()
        self.pid = self._process.pid

    def requests(self) -> Counter[str]:
        """Return the number of answered requests by route."""
        request = urllib.request.Request(f"{self.url}/metrics")
        request.add_header("authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request) as answer:
            text = answer.read().decode()
        counts: Counter[str] = Counter()
        for line in text.splitlines():
            if line.startswith("slicewise_http_requests_total{"):
                labels, _, value = line.rpartition(" ")
                route = re.search(r'route="([^"]*)"', labels)
                counts[route[1] if route else ""] += int(float(value))
        return counts

    def stop(self) -> None:
        """Stop the server."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


class Agents:
    """Agent processes, each with its own machine."""

    def __init__(self, folder: Path, server: Server, count: int) -> None:
        self._folder = folder
        self._server = server
        self._library = build(folder / "driver").absolute()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.machines: list[Machine] = []
        self._count = count

    def start(self) -> float:
        """Start all agents, wait until the service knows them, and return the seconds that took."""
        begun = time.perf_counter()
        with Client(self._server.url, self._server.token) as admin:
            for number in range(self._count):
                self._launch(admin, number)
                if number % _AT_ONCE == _AT_ONCE - 1 or number == self._count - 1:
                    while sum(node.managed and not node.holds for node in admin.nodes()) <= number:
                        self._check_running()
                        time.sleep(0.05)
        return time.perf_counter() - begun

    def _launch(self, admin: Client, number: int) -> None:
        home = self._folder / f"node-{number:03}"
        home.mkdir()
        machine = Machine.create(home / "machine", MODEL, GPUS, seed=number + 1)
        token = admin.issue_token(Role.AGENT, node=home.name)
        (home / "token").write_text(token.token)
        command = [sys.executable, "-m", "slicewise.agent", "--server", self._server.url]
        command += ["--token-file", str(home / "token"), "--state", str(home / "state")]
        command += ["--cdi", str(home / "cdi")]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | machine.environment(self._library),
            )
        self.processes.append(process)
        self.machines.append(machine)

    def _check_running(self) -> None:
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                log = self._folder / f"node-{number:03}" / "log"
                raise SystemExit(f"agent {number} has ended: {log.read_text()}")

    def instances(self) -> int:
        """Return the number of instances on all GPUs."""
        return sum(len(machine.instances()) for machine in self.machines)

    def calls(self) -> int:
        """Return the number of driver calls."""
        return sum(sum(machine.calls().values()) for machine in self.machines)

    def stop(self) -> None:
        """Stop all agents."""
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time used by processes."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def memory_mib(pids: list[int]) -> tuple[float, float]:
    """Return the mean memory of processes: resident, and proportional (shared pages divided)."""
    resident, own = [], []
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found = {k: int(v) for k, v in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
        resident.append(found["Rss"] / 1024)
        own.append(found["Pss"] / 1024)
    return statistics.mean(resident), statistics.mean(own)


# Measurements


def idle(server: Server, agents: Agents, seconds: float) -> dict[str, Any]:
    """Measure requests, CPU use and driver calls while there is no work."""
    pids = [process.pid for process in agents.processes]
    count = len(pids)
    before = server.requests(), cpu_seconds([server.pid]), cpu_seconds(pids), agents.calls()
    begun = time.perf_counter()
    time.sleep(seconds)
    took = time.perf_counter() - begun
    after = server.requests(), cpu_seconds([server.pid]), cpu_seconds(pids), agents.calls()
    asked = after[0] - before[0]
    by_agents = {route: n for route, n in asked.items() if "/agent/" in route}
    minutes = took / 60 * count
    return {
        "seconds": took,
        "requests_per_agent_minute": sum(by_agents.values()) / minutes,
        "requests": by_agents,
        "server_cpu": (after[1] - before[1]) / took,
        "agent_cpu": (after[2] - before[2]) / took / count,
        "driver_calls_per_agent_minute": (after[3] - before[3]) / minutes,
    }


class Watcher:
    """Records from the event stream when instances become active and when they are gone."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, Phase], asyncio.Future[float]] = {}

    def expect(self, allocation: str, phase: Phase) -> asyncio.Future[float]:
        """Return a future of the time at which an allocation reaches a phase."""
        loop = asyncio.get_running_loop()
        return self._heard.setdefault((allocation, phase), loop.create_future())

    def forget(self, allocation: str) -> None:
        """Remove the futures of an allocation."""
        for phase in (Phase.ACTIVE, Phase.GONE):
            self._heard.pop((allocation, phase), None)

    async def follow(self, admin: AsyncClient, after: int) -> None:
        """Follow the event stream until cancelled."""
        async for event in admin.events(after):
            entry = event.entry
            if isinstance(entry, PartTurned) and entry.phase in (Phase.ACTIVE, Phase.GONE):
                future = self.expect(entry.allocation, entry.phase)
                if not future.done():
                    future.set_result(time.perf_counter())


async def load(server: Server, clients: int, seconds: float, managed: bool) -> dict[str, Any]:
    """Measure clients that each allocate, wait, release, and start again."""
    active: list[float] = []
    answered: list[float] = []
    gone: list[float] = []
    watcher = Watcher()
    profile = PROFILE if managed else PLAIN_PROFILE

    async def work(client: AsyncClient) -> None:
        while time.perf_counter() < begun + seconds:
            asked = time.perf_counter()
            one = await client.allocate(profile)
            answered.append(time.perf_counter() - asked)
            if managed:
                active.append(await watcher.expect(one.id, Phase.ACTIVE) - asked)
            released = time.perf_counter()
            await client.release(one.id)
            if managed:
                gone.append(await watcher.expect(one.id, Phase.GONE) - released)
                watcher.forget(one.id)

    async with AsyncClient(server.url, server.token) as admin:
        following = asyncio.create_task(watcher.follow(admin, (await admin.cluster()).seq))
        begun = time.perf_counter()
        cpu = cpu_seconds([server.pid])
        await asyncio.gather(*(work(admin) for _ in range(clients)))
        following.cancel()
        await asyncio.wait({following})
    took = time.perf_counter() - begun
    return {
        "clients": clients,
        "managed": managed,
        "per_second": len(answered) / took,
        "answered_ms": percentiles(answered),
        "active_ms": percentiles(active) if managed else None,
        "gone_ms": percentiles(gone) if managed else None,
        "server_cpu": (cpu_seconds([server.pid]) - cpu) / took,
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    ordered = sorted(seconds)
    return {
        f"p{rank}": 1e3 * ordered[min(len(ordered) * rank // 100, len(ordered) - 1)]
        for rank in (50, 90, 99)
    } | {"max": 1e3 * ordered[-1], "count": len(ordered)}


@contextmanager
def site(options: argparse.Namespace) -> Iterator[tuple[Server, Agents]]:
    """Start a server, create its agents, and stop all of them at the end."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        server = Server(folder / "data", options.policy)
        agents = Agents(folder, server, options.agents)
        try:
            yield server, agents
        finally:
            agents.stop()
            server.stop()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements."""

    def progress(text: str) -> None:
        if not options.json:
            print(text, flush=True)

    with site(options) as (server, agents):
        progress(f"starting {options.agents} agents with {GPUS} GPUs each")
        found: dict[str, Any] = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_average": os.getloadavg(),
            "agents": options.agents,
            "gpus": options.agents * GPUS,
            "policy": options.policy,
            "start_seconds": agents.start(),
        }
        pids = [process.pid for process in agents.processes]
        resident, own = memory_mib(pids)
        found["agent_memory_mib"] = {"resident": resident, "proportional": own}
        found["server_memory_mib"] = memory_mib([server.pid])[0]
        with Client(server.url, server.token) as admin:
            for number in range(options.agents):
                admin.add_node(f"plain-{number:03}", PLAIN_MODEL, GPUS)
        progress(f"idle for {options.idle:g} seconds")
        found["idle"] = idle(server, agents, options.idle)
        found["load"] = []
        for clients in options.clients:
            for managed in (False, True):
                progress(f"{clients} clients, {'with' if managed else 'without'} agents")
                found["load"].append(asyncio.run(load(server, clients, options.seconds, managed)))
        found["instances_left"] = agents.instances()
    return found


def report(found: dict[str, Any]) -> Iterator[str]:
    """Yield the results as text."""
    quiet, memory = found["idle"], found["agent_memory_mib"]
    yield (
        f"{found['agents']} agents with {found['gpus']} GPUs, {found['cores']} cores, Python "
        f"{found['python']}, load before {found['load_average'][0]:.1f}, policy {found['policy']}"
    )
    yield (
        f"  started in {found['start_seconds']:.1f} s; an agent holds {memory['resident']:.0f} MiB "
        f"({memory['proportional']:.0f} with what is shared divided), the server "
        f"{found['server_memory_mib']:.0f} MiB"
    )
    yield (
        f"  idle: {quiet['requests_per_agent_minute']:.2f} requests an agent and minute "
        f"{quiet['requests']}, server {100 * quiet['server_cpu']:.1f}% of a core, an agent "
        f"{100 * quiet['agent_cpu']:.2f}%, {quiet['driver_calls_per_agent_minute']:.0f} driver "
        "calls an agent and minute"
    )
    yield f"  {'':36}allocations/s     p50     p90     p99     max ms  server CPU"
    for point in found["load"]:
        times = point["active_ms"] or point["answered_ms"]
        what = "request to active" if point["managed"] else "no agents: to placed"
        row = f"  {what:21}{point['clients']:4} clients {point['per_second']:10.1f}   "
        yield (
            row
            + " ".join(f"{times[name]:7.1f}" for name in ("p50", "p90", "p99", "max"))
            + f"        {point['server_cpu']:4.2f}"
        )
    pairs = zip(found["load"][::2], found["load"][1::2], strict=True)
    for plain, managed in pairs:
        ratio = managed["active_ms"]["p50"] / plain["answered_ms"]["p50"]
        yield (
            f"  ratio at {plain['clients']} clients: an instance that exists takes {ratio:.1f} "
            f"times as long as a decision alone (p50); gone again after "
            f"{managed['gone_ms']['p50']:.1f} ms"
        )
    yield f"  instances left over: {found['instances_left']}"


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--agents", type=int, default=200, help=f"nodes with {GPUS} GPUs each")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one measurement")
    parser.add_argument(
        "--idle",
        type=float,
        default=100.0,
        help="seconds to watch idle agents; a poll is open for 25",
    )
    parser.add_argument("--clients", default="1,8,32", help="numbers of concurrent clients")
    parser.add_argument("--policy", default="default", help="placement policy")
    parser.add_argument("--folder", type=Path, help="folder of the database (on a real disk)")
    parser.add_argument("--quick", action="store_true", help="20 agents, a few seconds each")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_args()
    if options.quick:
        options.agents = min(options.agents, 20)
        options.seconds, options.idle = min(options.seconds, 3.0), min(options.idle, 30.0)
    options.clients = [int(text) for text in options.clients.split(",")]
    if options.agents < 1 or min(options.clients) < 1:
        parser.error("agents and clients must be at least 1")
    found = measure(options)
    print(json.dumps(found, indent=2) if options.json else "\n".join(report(found)))


if __name__ == "__main__":
    main()
