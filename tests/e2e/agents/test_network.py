"""The network between an agent and the server is cut, in a network namespace.

Two kinds of failure: a link that is down, where sending fails at once, and silence, where packets
go to an unused hardware address.
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

_UNUSED_ADDRESS = "02:00:00:00:00:99"


class Link:
    """A network namespace with a link that can be cut."""

    def __init__(self) -> None:
        number = os.getpid()
        self.name = f"slicewise-{number}"
        self._near, self._far = f"sw{number}", f"sx{number}"
        network = f"10.{random.randint(128, 254)}.{random.randint(0, 254)}"
        self.server, self._agent = f"{network}.1", f"{network}.2"

    def create(self) -> None:
        """Create the namespace and the link."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far,
            "netns", self.name)  # fmt: skip
        _ip("address", "add", f"{self.server}/30", "dev", self._near)
        _ip("link", "set", self._near, "up")
        self._inside("address", "add", f"{self._agent}/30", "dev", self._far)
        self._inside("link", "set", self._far, "up")

    def delete(self) -> None:
        """Delete the namespace and the link."""
        _ip("netns", "delete", self.name, check=False)
        _ip("link", "delete", self._near, check=False)

    def cut(self, kind: str) -> None:
        """Cut the link."""
        if kind == "link":
            self._inside("link", "set", self._far, "down")
        else:
            self._neighbour(self.server, "lladdr", _UNUSED_ADDRESS, "nud", "permanent")
            _ip("neigh", "replace", self._agent, "dev", self._near, "lladdr", _UNUSED_ADDRESS,
                "nud", "permanent")  # fmt: skip

    def restore(self, kind: str) -> None:
        """Restore the link."""
        if kind == "link":
            self._inside("link", "set", self._far, "up")
        else:
            self._inside("neigh", "delete", self.server, "dev", self._far)
            _ip("neigh", "delete", self._agent, "dev", self._near)

    def _neighbour(self, address: str, *arguments: str) -> None:
        self._inside("neigh", "replace", address, "dev", self._far, *arguments)

    def _inside(self, *arguments: str) -> None:
        _ip("-n", self.name, *arguments)


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


@pytest.fixture
def wire() -> Iterator[Link]:
    """A link that is deleted after the test, when its agents have ended."""
    made = Link()
    able = shutil.which("ip") is not None and os.geteuid() == 0
    if not able and not os.environ.get("CI"):
        pytest.skip("a network namespace needs `ip` (iproute2) and root")
    try:
        made.create()
        yield made
    finally:
        made.delete()


@pytest.fixture
def far(wire: Link, open_site: OpenSite) -> tuple[Site, Node]:
    """A site with one node behind the link and one that is not."""
    site = open_site("agents.lost_seconds=1", host=wire.server)
    node = site.node("far", gpus=1)
    node.prefix = ("ip", "netns", "exec", wire.name)
    node.create_foreign(0, "1g.18gb", 6)
    near = site.node("near", model="A30-24GB", gpus=1)
    for one in (node, near):
        one.start()
    for one in (node, near):
        site.until_ready(one)
    site.settle()
    return site, node


def unknown(site: Site) -> str:
    """Why the far node is held as unknown, or ""."""
    holds: dict[str, str] = site.detail("far")["holds"]
    return holds.get("unknown", "")


def mask(site: Site) -> str:
    """The mask of the far node's GPU."""
    found: list[dict[str, Any]] = site.detail("far")["devices"]
    return str(found[0]["mask"])


def test_cut_while_creating_and_destroying(
    far: tuple[Site, Node], wire: Link, rounds: int, tell: Tell
) -> None:
    site, node = far
    cuts = 0
    for kind in ("link", "silence") * rounds:
        # While an instance is being created.
        node.machine.delay("nvmlGpuInstanceCreateComputeInstance", 700, times=1)
        made = site.allocate("3g.71gb")
        site.until(lambda: node.own_instances(), "the instance exists")
        wire.cut(kind)
        cuts += 1
        site.until(lambda: unknown(site), "the node is unknown")
        assert "its agent has been unreachable since" in unknown(site)
        assert site.allocation(made["id"])["state"] in ("placed", "creating")
        site.until(
            lambda: [i for i in node.own_instances() if i.computes],
            "the agent continues without the server",
        )
        status, said = site.server.ask("POST", "/v1/allocations", {"profile": "1g.18gb"})
        assert status == 409, said  # nothing is placed on the node
        waits = site.allocate("1g.18gb", status=202, wait_seconds=600)
        elsewhere = site.until_state(site.allocate("1g.6gb")["id"], "active")
        assert elsewhere["node"] == "near"
        taken = mask(site)
        assert taken.count("1") == 5, taken
        wire.restore(kind)
        site.until_state(made["id"], "active")
        site.until(lambda: not unknown(site), "the node is known again")
        served = site.until_state(waits["id"], "active")
        assert served["node"] == "far"
        site.release(elsewhere["id"])
        site.settle()

        # While it is being destroyed, and another one is released.
        node.machine.delay("nvmlGpuInstanceDestroy", 500, times=1)
        site.release(made["id"])
        wire.cut(kind)
        cuts += 1
        site.until(lambda: unknown(site), "the node is unknown")
        site.release(served["id"])
        assert mask(site).count("1") == 6, "nothing is free until the agent reports it"
        assert site.allocation(served["id"])["state"] == "releasing"
        wire.restore(kind)
        for one in (made, served):
            site.until_state(one["id"], "released")
        site.until(lambda: not unknown(site), "the node is known again")
        site.settle()
        assert node.own_instances() == []

        # The agent is killed during the cut; the next one waits for the network.
        made = site.allocate("2g.35gb")
        wire.cut(kind)
        cuts += 1
        node.kill()
        site.until(lambda: node.runs, "the agent is started again")
        site.until(lambda: unknown(site), "the node is unknown")
        wire.restore(kind)
        site.until_state(made["id"], "active")
        site.release(made["id"])
        site.until_state(made["id"], "released")
        site.settle()
    assert node.remaining_foreign() == node.foreign
    holds = [e["entry"] for e in site.events() if e["kind"] == "node-held"]
    lost = sum("unknown" in entry["reasons"] for entry in holds)
    tell(
        f"{cuts} cuts of the network (link down, silence) while creating and destroying, "
        f"{lost} times the node was unknown, nothing freed, "
        f"all recovered; {len(node.foreign)} foreign instance untouched"
    )
