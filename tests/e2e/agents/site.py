"""A site: one real server and nodes with real agents on a fake driver.

`Site.settle` waits until server, driver, record and CDI files agree. Agents are processes that may
be killed and restarted; machines outlive them. Foreign instances must survive every test.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.server import PATIENCE_SECONDS, Server, free_port

from slicewise.fakedriver import Machine, SimulatedInstance

FAST_AGENT = Path(__file__).with_name("fast_agent.py")
MODEL = "H200-141GB"
SETTINGS = ("limits.requests_per_second=1000000", "lease.seconds=0.5")
_POLL_SECONDS = 0.02
_LAST_LINES = 25

Place = tuple[int, str, int]
"""A GPU's index, a profile and a start."""


class SteadyServer(Server):
    """A server that keeps its address when it is restarted."""

    host = "127.0.0.1"

    def launch(self) -> None:
        """Start the process at its previous address."""
        assert not self.runs, "the server is running already"
        self.address = self.host, self.address[1] or free_port()
        command = [sys.executable, "-m", "slicewise.cli", "serve", "--data", str(self.data)]
        command += ["--listen", "{}:{}".format(*self.address)]
        if self.database is not None:
            command += ["--database", self.database]
        for setting in self.settings:
            command += ["--set", setting]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLICEWISE_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        self.starts += 1


class Node:
    """A simulated machine and its agent."""

    def __init__(
        self, folder: Path, name: str, machine: Machine, library: Path, server: Server, token: str
    ) -> None:
        self.name = name
        self.machine = machine
        self.folder = folder
        self.log = folder / "log"
        self.cdi = folder / "cdi"
        self.state = folder / "state"
        self.foreign: set[str] = set()
        """UUIDs of foreign instances."""
        self.restarts = True
        """Whether a killed agent is restarted."""
        self.prefix: Sequence[str] = ()
        self.url = ""
        """The server's URL for this agent, if it differs from the usual one."""
        self.arguments: Sequence[str] = ()
        self.variables: dict[str, str] = {}
        self.session = ""
        """The last session seen by `until_ready`."""
        self.deaths = 0
        self.starts = 0
        self._library = library
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self.token = folder / "token"
        self.token.write_text(token)

    # Agent

    def start(self, *arguments: str, fast: bool = True) -> subprocess.Popen[bytes]:
        """Start an agent with additional arguments."""
        program = [str(FAST_AGENT)] if fast else ["-m", "slicewise.agent"]
        command = [*self.prefix, sys.executable, *program, "--server", self.url or self._server.url]
        command += ["--token-file", str(self.token), "--state", str(self.state)]
        command += ["--cdi", str(self.cdi), *self.arguments, *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLICEWISE_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | self.variables | self.machine.environment(self._library),
            )
        self.starts += 1
        return self._process

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The agent's process, running or not."""
        assert self._process is not None
        return self._process

    @property
    def runs(self) -> bool:
        """Whether the agent is running."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill the agent (-9)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """Terminate the agent and return its exit status."""
        self.process.terminate()
        status = self.process.wait(PATIENCE_SECONDS)
        self.deaths += status == -signal.SIGKILL  # killed by a fault just before
        self._process = None
        return status

    def restart_killed(self) -> None:
        """Restart the agent if it was killed, or exited with the status for a restart."""
        if self._process is None or self.runs or not self.restarts:
            return
        status = self._process.returncode
        assert status in (-signal.SIGKILL, 1), f"the agent exited with {status}\n{self.log_tail()}"
        self.deaths += status == -signal.SIGKILL
        self.start()

    def log_tail(self) -> str:
        """The last lines of the agent's log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"{self.name}:\n" + "\n".join(lines[-_LAST_LINES:])

    # Instances

    def create_foreign(self, gpu: int, profile: str, start: int) -> SimulatedInstance:
        """Create a foreign instance."""
        made = self.machine.create_instance(gpu, profile, start)
        self.foreign.add(made.computes[0].uuid)
        return made

    def own_instances(self) -> list[SimulatedInstance]:
        """The instances that are not foreign."""
        return [one for one in self.machine.instances() if not self.foreign & _uuids(one)]

    def remaining_foreign(self) -> set[str]:
        """The foreign instances that still exist."""
        return self.foreign & {u for one in self.machine.instances() for u in _uuids(one)}


class Site:
    """A server and its nodes."""

    def __init__(
        self,
        folder: Path,
        library: Path,
        *settings: str,
        host: str = "",
        database: str | None = None,
    ) -> None:
        self.folder = folder
        self.library = library
        if host:
            settings = (*settings, "listen_without_tls=true")
        settings = (*SETTINGS, *settings)
        self.server = SteadyServer(folder / "server", database=database, settings=settings)
        self.server.host = host or self.server.host
        self.nodes: dict[str, Node] = {}
        self.restart_server = True
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Site:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.kill()
        self.server.kill()

    def node(
        self, name: str = "gpu-07", model: str = MODEL, gpus: int = 2, mig: bool = True
    ) -> Node:
        """Create a node; its agent is not started."""
        folder = self.folder / name
        folder.mkdir()
        machine = Machine.create(folder / "machine", model, gpus, mig=mig, seed=len(self.nodes) + 1)
        token = self.ask("POST", "/v1/tokens", {"role": "agent", "node": name}, status=201)
        made = Node(folder, name, machine, self.library, self.server, token["token"])
        self.nodes[name] = made
        return made

    # Requests

    def ask(self, method: str, path: str, body: object = None, status: int = 200) -> Any:
        """Send a request and return the answer; its status must be the given one."""
        found, said = self.server.ask(method, path, body)
        assert found == status, f"{method} {path}: {found} {said}\n{self.server.last_lines()}"
        return said

    def allocate(self, profile: str, status: int = 201, **more: object) -> dict[str, Any]:
        """Create an allocation."""
        body = {"profile": profile} | more
        said: dict[str, Any] = self.ask("POST", "/v1/allocations", body, status)
        return said

    def allocate_soon(self, profile: str) -> dict[str, Any]:
        """Create an allocation that may wait, for nodes with an agent that just started."""
        body = {"profile": profile, "wait_seconds": 600}
        status, said = self.server.ask("POST", "/v1/allocations", body)
        assert status in (201, 202), f"{status} {said}\n{self.server.last_lines()}"
        return dict(said)

    def allocation(self, identity: str) -> dict[str, Any]:
        """The current state of an allocation."""
        said: dict[str, Any] = self.ask("GET", f"/v1/allocations/{identity}")
        return said

    def release(self, identity: str) -> dict[str, Any]:
        """Release an allocation."""
        said: dict[str, Any] = self.ask("DELETE", f"/v1/allocations/{identity}")
        return said

    def detail(self, node: str) -> dict[str, Any]:
        """The server's view of a node."""
        said: dict[str, Any] = self.ask("GET", f"/v1/nodes/{node}")
        return said

    def allocations(self) -> list[dict[str, Any]]:
        """Allocations that have not ended."""
        return self._pages("/v1/allocations?limit=500")

    def releasing(self) -> list[dict[str, Any]]:
        """Allocations that have ended and may still have instances."""
        return self._pages("/v1/allocations?state=releasing&limit=500")

    def _pages(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = self.ask("GET", path + cursor)
            found += page["allocations"]
            if page["next"] is None:
                return found
            cursor = f"&cursor={page['next']}"

    def events(self) -> list[dict[str, Any]]:
        """All events of the audit log."""
        found: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = self.ask("GET", f"/v1/audit?limit=500{cursor}")
            found += page["events"]
            if page["next"] is None:
                return found
            cursor = f"&cursor={page['next']}"

    # Waiting

    def until(self, done: Callable[[], object], what: str) -> None:
        """Wait for a condition; restart processes that are killed meanwhile."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                if done():
                    return
            except (OSError, http.client.HTTPException):
                pass  # the server is down at the moment
            assert time.monotonic() < give_up, f"timed out waiting until {what}\n{self.summary()}"
            self.restart_killed()
            time.sleep(_POLL_SECONDS)

    def restart_killed(self) -> None:
        """Restart killed processes."""
        if self.restart_server and not self.server.runs:
            self.counts["server deaths"] += 1
            self.server.start()
        for node in self.nodes.values():
            node.restart_killed()

    def until_state(self, identity: str, *states: str) -> dict[str, Any]:
        """Wait until an allocation is in one of these states."""
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.clear()
            seen.update(self.allocation(identity))
            return seen["state"] in states

        self.until(there, f"{identity} is {' or '.join(states)}")
        return seen

    def until_ready(self, node: Node) -> None:
        """Wait until a new session of the agent has sent its first report."""
        self.until(lambda: self._is_ready(node), f"{node.name} is ready")

    def _is_ready(self, node: Node) -> bool:
        status, said = self.server.ask("GET", f"/v1/nodes/{node.name}")
        if status != 200 or said["agent"] is None or {"unknown", "unreported"} & {*said["holds"]}:
            return False
        before, node.session = node.session, said["agent"]["session"]
        return before != node.session

    def summary(self) -> str:
        """The current differences and the last log lines, for failed assertions."""
        try:
            differences = "\n".join(self.differences())
        except (OSError, http.client.HTTPException, AssertionError) as error:
            differences = repr(error)
        logs = "\n".join(node.log_tail() for node in self.nodes.values())
        return f"{differences}\n{logs}\nserver:\n{self.server.last_lines()}"

    # Consistency

    def settle(self) -> None:
        """Wait until all work is done and all views of every GPU agree."""
        self.until(lambda: not self.differences(), "hardware and server agree")

    def differences(self) -> list[str]:
        """The differences between server, driver, record and CDI files."""
        allocations, releasing = self.allocations(), self.releasing()
        found = [f"{one['id']} is releasing" for one in releasing]
        for one in allocations:
            if one["state"] not in ("active", "queued"):
                found.append(f"{one['id']} is {one['state']}: {one['instances']}")
        for node in self.nodes.values():
            parts = [p for one in allocations for p in one["instances"] if p["node"] == node.name]
            found += self._differences(node, parts)
        return found

    def _differences(self, node: Node, parts: Iterable[dict[str, Any]]) -> list[str]:
        parts = list(parts)
        detail = self.detail(node.name)
        instances = node.machine.instances()
        hardware = {(i.gpu, i.profile, i.start): _uuid(i) for i in instances}
        foreign = [one for gpu in detail["devices"] for one in gpu["foreign"]]
        known = {(p["gpu"], p["profile"], p["start"]): p.get("uuid", "") for p in parts}
        known |= {(f["gpu"], f["profile"], f["start"]): f["uuid"] for f in foreign}
        found = _compare(f"{node.name}: driver and server", hardware, known)
        masks = [gpu["mask"] for gpu in detail["devices"]]
        real = [_mask(instances, gpu, len(mask)) for gpu, mask in enumerate(masks)]
        if masks != real:
            found.append(f"{node.name}: slices {masks} in the server, {real} on the GPUs")
        ours = {(p["gpu"], p["profile"], p["start"]): p.get("uuid", "") for p in parts}
        written = node.state / "instances.json"
        record = json.loads(written.read_text()) if written.exists() else {"instances": []}
        index = {gpu.uuid: gpu.index for gpu in node.machine.gpus}
        recorded = {
            (index[one["gpu"]], one["profile"], one["start"]): one["uuid"]
            for one in record["instances"]
            if record["boot"] == node.machine.boot_id  # entries of an earlier boot do not count
        }
        found += _compare(f"{node.name}: record and server", recorded, ours)
        offered = {
            json.loads(file.read_text())["devices"][0]["name"] for file in node.cdi.glob("*.json")
        }
        if offered != set(ours.values()):
            found.append(f"{node.name}: CDI {sorted(offered)}, server {sorted(ours.values())}")
        missing = node.foreign - node.remaining_foreign()
        assert not missing, f"foreign instances were destroyed: {missing}\n{node.log_tail()}"
        return found


def failures(site: Site) -> list[str]:
    """Why allocations failed, from the audit log."""
    ended = [event["entry"]["allocation"] for event in site.events() if event["kind"] == "ended"]
    return [f"{one['id']}: {one['detail']}" for one in ended if one["cause"] == "failed"]


def _compare(what: str, left: dict[Place, str], right: dict[Place, str]) -> list[str]:
    return [
        f"{what} disagree about {place}: {left.get(place)} and {right.get(place)}"
        for place in sorted({*left, *right})
        if left.get(place) != right.get(place)
    ]


def _mask(instances: Iterable[SimulatedInstance], gpu: int, slices: int) -> str:
    taken = {piece for i in instances if i.gpu == gpu for piece in range(i.start, i.start + i.size)}
    return "".join("1" if piece in taken else "0" for piece in range(slices))


def _uuid(one: SimulatedInstance) -> str:
    return one.computes[0].uuid if one.computes else ""


def _uuids(one: SimulatedInstance) -> set[str]:
    return {compute.uuid for compute in one.computes}
