"""A site: one real server, nodes with a fake driver and real agents, and whether all of them agree.

Agents are processes that are killed and started again; a machine outlives them, as hardware does.
On every GPU there may be instances of somebody else's, which must be there to the end.
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

from slicewise.fakedriver import Machine
from slicewise.fakedriver.views import InstanceView

HURRIED = Path(__file__).with_name("hurried.py")
MODEL = "H200-141GB"
SETTINGS = ("limits.requests_per_second=1000000", "lease.seconds=0.5")
_LOOK_SECONDS = 0.02
_LAST_LINES = 25

Place = tuple[int, str, int]
"""A GPU's index, a profile and a start."""


class SteadyServer(Server):
    """A server that comes back at the address it had: agents know no other."""

    host = "127.0.0.1"

    def launch(self) -> None:
        """Start the process where it was before."""
        assert not self.runs, "it runs already"
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
    """A machine that does not exist, and the agent on it."""

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
        """UUIDs of instances that are somebody else's."""
        self.keeps_running = True
        """Whether an agent that was killed is started again."""
        self.prefix: Sequence[str] = ()
        self.url = ""
        """Where the agent finds the server, if that is not where everybody does."""
        self.words: Sequence[str] = ()
        self.variables: dict[str, str] = {}
        self.session = ""
        """The last one that was waited for."""
        self.deaths = 0
        self.starts = 0
        self._library = library
        self._server = server
        self._process: subprocess.Popen[bytes] | None = None
        self.token = folder / "token"
        self.token.write_text(token)

    # The agent

    def start(self, *words: str, hurried: bool = True) -> subprocess.Popen[bytes]:
        """Start an agent; with more words on its command line if need be."""
        program = [str(HURRIED)] if hurried else ["-m", "slicewise.agent"]
        command = [*self.prefix, sys.executable, *program, "--server", self.url or self._server.url]
        command += ["--token-file", str(self.token), "--state", str(self.state)]
        command += ["--cdi", str(self.cdi), *self.words, *words]
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
        """The agent's process, dead or alive."""
        assert self._process is not None
        return self._process

    @property
    def runs(self) -> bool:
        """Whether the agent lives."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """End the agent with kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """Ask the agent to end."""
        self.process.terminate()
        status = self.process.wait(PATIENCE_SECONDS)
        self.deaths += status == -signal.SIGKILL  # by a fault, just before
        self._process = None
        return status

    def revive(self) -> None:
        """Start the agent again if it was killed, or ended because it must be started again."""
        if self._process is None or self.runs or not self.keeps_running:
            return
        status = self._process.returncode
        assert status in (-signal.SIGKILL, 1), f"the agent ended with {status}\n{self.told()}"
        self.deaths += status == -signal.SIGKILL
        self.start()

    def told(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"{self.name}:\n" + "\n".join(lines[-_LAST_LINES:])

    # Others

    def put_foreign(self, gpu: int, profile: str, start: int) -> InstanceView:
        """Somebody else makes an instance."""
        made = self.machine.create_instance(gpu, profile, start)
        self.foreign.add(made.computes[0].uuid)
        return made

    def own(self) -> list[InstanceView]:
        """The instances that are not somebody else's."""
        return [one for one in self.machine.instances() if not self.foreign & _uuids(one)]

    def foreign_left(self) -> set[str]:
        """Which of somebody else's instances are there."""
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
        self.server_keeps_running = True
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
        """A node whose agent is not started yet."""
        folder = self.folder / name
        folder.mkdir()
        machine = Machine.create(folder / "machine", model, gpus, mig=mig, seed=len(self.nodes) + 1)
        token = self.ask("POST", "/v1/tokens", {"role": "agent", "node": name}, status=201)
        made = Node(folder, name, machine, self.library, self.server, token["token"])
        self.nodes[name] = made
        return made

    # Asking

    def ask(self, method: str, path: str, body: object = None, status: int = 200) -> Any:
        """What the server says; it must say it with this status."""
        found, said = self.server.ask(method, path, body)
        assert found == status, f"{method} {path}: {found} {said}\n{self.server.last_lines()}"
        return said

    def allocate(self, profile: str, status: int = 201, **more: object) -> dict[str, Any]:
        """A new allocation."""
        body = {"profile": profile} | more
        said: dict[str, Any] = self.ask("POST", "/v1/allocations", body, status)
        return said

    def allocate_soon(self, profile: str) -> dict[str, Any]:
        """A new allocation, which waits where an agent has only just begun."""
        body = {"profile": profile, "wait_seconds": 600}
        status, said = self.server.ask("POST", "/v1/allocations", body)
        assert status in (201, 202), f"{status} {said}\n{self.server.last_lines()}"
        return dict(said)

    def allocation(self, identity: str) -> dict[str, Any]:
        """An allocation as it is now."""
        said: dict[str, Any] = self.ask("GET", f"/v1/allocations/{identity}")
        return said

    def release(self, identity: str) -> dict[str, Any]:
        """An allocation is given back."""
        said: dict[str, Any] = self.ask("DELETE", f"/v1/allocations/{identity}")
        return said

    def detail(self, node: str) -> dict[str, Any]:
        """A node as the server knows it."""
        said: dict[str, Any] = self.ask("GET", f"/v1/nodes/{node}")
        return said

    def living(self) -> list[dict[str, Any]]:
        """The allocations that have not ended."""
        return self._pages("/v1/allocations?limit=500")

    def leaving(self) -> list[dict[str, Any]]:
        """Those that have ended and may still have instances."""
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
        """The journal's entries, as an admin reads them."""
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
        """Wait for something; whoever was killed meanwhile is started again."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                if done():
                    return
            except (OSError, http.client.HTTPException):
                pass  # the server is away at the moment
            assert time.monotonic() < give_up, f"never: {what}\n{self.told()}"
            self.revive()
            time.sleep(_LOOK_SECONDS)

    def revive(self) -> None:
        """Start whoever was killed."""
        if self.server_keeps_running and not self.server.runs:
            self.counts["server deaths"] += 1
            self.server.start()
        for node in self.nodes.values():
            node.revive()

    def until_state(self, identity: str, *states: str) -> dict[str, Any]:
        """Wait until an allocation is in one of these states."""
        seen: dict[str, Any] = {}

        def there() -> bool:
            seen.clear()
            seen.update(self.allocation(identity))
            return seen["state"] in states

        self.until(there, f"{identity} becomes {' or '.join(states)}")
        return seen

    def until_ready(self, node: Node) -> None:
        """Wait until an agent that was started has said what is there."""
        self.until(lambda: self._known(node), f"{node.name} is known")

    def _known(self, node: Node) -> bool:
        status, said = self.server.ask("GET", f"/v1/nodes/{node.name}")
        if status != 200 or said["agent"] is None or {"unknown", "unreported"} & {*said["holds"]}:
            return False
        before, node.session = node.session, said["agent"]["session"]
        return before != node.session

    def told(self) -> str:
        """What everybody said last."""
        try:
            differences = "\n".join(self.differences())
        except (OSError, http.client.HTTPException, AssertionError) as error:
            differences = repr(error)
        logs = "\n".join(node.told() for node in self.nodes.values())
        return f"{differences}\n{logs}\nserver:\n{self.server.last_lines()}"

    # Whether all agree

    def settle(self) -> None:
        """Wait until nothing is under way and everybody says the same about every GPU."""
        self.until(lambda: not self.differences(), "the hardware is as the server says")

    def differences(self) -> list[str]:
        """Where scheduler, driver, record and CDI files do not say the same."""
        living, leaving = self.living(), self.leaving()
        found = [f"{one['id']} is leaving" for one in leaving]
        for one in living:
            if one["state"] not in ("active", "queued"):
                found.append(f"{one['id']} is {one['state']}: {one['instances']}")
        for node in self.nodes.values():
            parts = [p for one in living for p in one["instances"] if p["node"] == node.name]
            found += self._differences(node, parts)
        return found

    def _differences(self, node: Node, parts: Iterable[dict[str, Any]]) -> list[str]:
        parts = list(parts)
        detail = self.detail(node.name)
        instances = node.machine.instances()
        hardware = {(i.gpu, i.profile, i.start): _uuid(i) for i in instances}
        strangers = [one for gpu in detail["devices"] for one in gpu["foreign"]]
        known = {(p["gpu"], p["profile"], p["start"]): p.get("uuid", "") for p in parts}
        known |= {(f["gpu"], f["profile"], f["start"]): f["uuid"] for f in strangers}
        found = _unlike(f"{node.name}: driver and server", hardware, known)
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
            if record["boot"] == node.machine.boot_id  # those of an earlier boot are over
        }
        found += _unlike(f"{node.name}: record and server", recorded, ours)
        offered = {
            json.loads(file.read_text())["devices"][0]["name"] for file in node.cdi.glob("*.json")
        }
        if offered != set(ours.values()):
            found.append(f"{node.name}: CDI {sorted(offered)}, server {sorted(ours.values())}")
        missing = node.foreign - node.foreign_left()
        assert not missing, f"somebody else's instances were destroyed: {missing}\n{node.told()}"
        return found


def failures(site: Site) -> list[str]:
    """Why allocations failed, by the journal."""
    ended = [event["entry"]["allocation"] for event in site.events() if event["kind"] == "ended"]
    return [f"{one['id']}: {one['detail']}" for one in ended if one["cause"] == "failed"]


def _unlike(what: str, left: dict[Place, str], right: dict[Place, str]) -> list[str]:
    return [
        f"{what} disagree about {place}: {left.get(place)} and {right.get(place)}"
        for place in sorted({*left, *right})
        if left.get(place) != right.get(place)
    ]


def _mask(instances: Iterable[InstanceView], gpu: int, slices: int) -> str:
    taken = {piece for i in instances if i.gpu == gpu for piece in range(i.start, i.start + i.size)}
    return "".join("1" if piece in taken else "0" for piece in range(slices))


def _uuid(one: InstanceView) -> str:
    return one.computes[0].uuid if one.computes else ""


def _uuids(one: InstanceView) -> set[str]:
    return {compute.uuid for compute in one.computes}
