"""The network between an agent and the server is cut, in a network namespace made for it.

Both ways in which networks fail: a link that is down, where sending fails at once, and silence,
where what is sent goes nowhere (to a hardware address that nobody has).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.agents.conftest import OpenSite
from tests.e2e.agents.site import Node, Site
from tests.e2e.conftest import Tell

_NOBODY = "02:00:00:00:00:99"


class Wire:
    """A namespace, and a cable to it that can be cut."""

    def __init__(self) -> None:
        number = os.getpid()
        self.name = f"slicewise-{number}"
        self._near, self._far = f"sw{number}", f"sx{number}"
        network = f"10.{random.randint(128, 254)}.{random.randint(0, 254)}"
        self.server, self._agent = f"{network}.1", f"{network}.2"

    def lay(self) -> None:
        """Make it."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far,
            "netns", self.name)  # fmt: skip
        _ip("address", "add", f"{self.server}/30", "dev", self._near)
        _ip("link", "set", self._near, "up")
        self._there("address", "add", f"{self._agent}/30", "dev", self._far)
        self._there("link", "set", self._far, "up")

    def clear(self) -> None:
        """Take it away; what is in the namespace has ended by then."""
        _ip("netns", "delete", self.name, check=False)
        _ip("link", "delete", self._near, check=False)

    def cut(self, kind: str) -> None:
        """Nothing gets through any more."""
        if kind == "link":
            self._there("link", "set", self._far, "down")
        else:
            self._neighbour(self.server, "lladdr", _NOBODY, "nud", "permanent")
            _ip("neigh", "replace", self._agent, "dev", self._near, "lladdr", _NOBODY, "nud",
                "permanent")  # fmt: skip

    def mend(self, kind: str) -> None:
        """Everything does again."""
        if kind == "link":
            self._there("link", "set", self._far, "up")
        else:
            self._there("neigh", "delete", self.server, "dev", self._far)
            _ip("neigh", "delete", self._agent, "dev", self._near)

    def _neighbour(self, address: str, *words: str) -> None:
        self._there("neigh", "replace", address, "dev", self._far, *words)

    def _there(self, *words: str) -> None:
        _ip("-n", self.name, *words)


def _ip(*words: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A cable that is taken away after the test, when the agents on it have ended."""
    made = Wire()
    able = shutil.which("ip") is not None and os.geteuid() == 0
    if not able and not os.environ.get("CI"):
        pytest.skip("a network namespace needs `ip` (iproute2) and root")
    try:
        made.lay()
        yield made
    finally:
        made.clear()


@pytest.fixture
def far(wire: Wire, open_site: OpenSite) -> tuple[Site, Node]:
    """A site with a node behind the cable, and one that is not."""
    site = open_site("agents.lost_seconds=1", host=wire.server)
    node = site.node("far", gpus=1)
    node.prefix = ("ip", "netns", "exec", wire.name)
    node.put_foreign(0, "1g.18gb", 6)
    near = site.node("near", model="A30-24GB", gpus=1)
    for one in (node, near):
        one.start()
    for one in (node, near):
        site.until_ready(one)
    site.settle()
    return site, node


def unknown(site: Site) -> str:
    """Why the far node is held, if it is."""
    holds: dict[str, str] = site.detail("far")["holds"]
    return holds.get("unknown", "")


def mask(site: Site) -> str:
    """The far node's slices."""
    found: list[dict[str, Any]] = site.detail("far")["devices"]
    return str(found[0]["mask"])


def test_cut_while_creating_and_destroying(
    far: tuple[Site, Node], wire: Wire, rounds: int, tell: Tell
) -> None:
    site, node = far
    cuts = 0
    for kind in ("link", "silence") * rounds:
        # While an instance is being made.
        node.machine.delay("nvmlGpuInstanceCreateComputeInstance", 700, times=1)
        made = site.allocate("3g.71gb")
        site.until(lambda: node.own(), "it is begun")
        wire.cut(kind)
        cuts += 1
        site.until(lambda: unknown(site), "the node is unknown")
        assert "its agent has not been heard of since" in unknown(site)
        assert site.allocation(made["id"])["state"] in ("placed", "creating")
        site.until(lambda: [i for i in node.own() if i.computes], "the agent goes on alone")
        status, said = site.server.ask("POST", "/v1/allocations", {"profile": "1g.18gb"})
        assert status == 409, said  # nothing new goes there
        waits = site.allocate("1g.18gb", status=202, wait_seconds=600)
        elsewhere = site.until_state(site.allocate("1g.6gb")["id"], "active")
        assert elsewhere["node"] == "near"
        taken = mask(site)
        assert taken.count("1") == 5, taken
        wire.mend(kind)
        site.until_state(made["id"], "active")
        site.until(lambda: not unknown(site), "the node is known again")
        served = site.until_state(waits["id"], "active")
        assert served["node"] == "far"
        site.release(elsewhere["id"])
        site.settle()

        # While it is being destroyed, and one more is released meanwhile.
        node.machine.delay("nvmlGpuInstanceDestroy", 500, times=1)
        site.release(made["id"])
        wire.cut(kind)
        cuts += 1
        site.until(lambda: unknown(site), "the node is unknown")
        site.release(served["id"])
        assert mask(site).count("1") == 6, "nothing is free before the agent says so"
        assert site.allocation(served["id"])["state"] == "releasing"
        wire.mend(kind)
        for one in (made, served):
            site.until_state(one["id"], "released")
        site.until(lambda: not unknown(site), "the node is known again")
        site.settle()
        assert node.own() == []

        # Cut, and the agent dies meanwhile: the next one waits for the network.
        made = site.allocate("2g.35gb")
        wire.cut(kind)
        cuts += 1
        node.kill()
        site.until(lambda: node.runs, "the agent is started again")
        site.until(lambda: unknown(site), "the node is unknown")
        wire.mend(kind)
        site.until_state(made["id"], "active")
        site.release(made["id"])
        site.until_state(made["id"], "released")
        site.settle()
    assert node.foreign_left() == node.foreign
    holds = [e["entry"] for e in site.events() if e["kind"] == "node-held"]
    lost = sum("unknown" in entry["reasons"] for entry in holds)
    tell(
        f"{cuts} cuts of the network (link down, silence) while creating and destroying, "
        f"{lost} times the node was unknown, nothing freed, "
        f"all healed; {len(node.foreign)} foreign instance untouched"
    )
