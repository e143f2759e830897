"""A random walk with allocations, foreign instances and killed agents; then all views agree."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.e2e.agents.conftest import OpenSite
from tests.e2e.agents.site import Node, Site, failures
from tests.e2e.conftest import Tell

from slicewise import load_geometry
from slicewise.core.errors import PlacementError

NODES = (("h0", "H200-141GB", 2), ("h1", "H200-141GB", 3), ("a0", "A30-24GB", 2))
PROFILES = ("1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "7g.141gb", "1g.6gb", "2g.12gb")
OPERATIONS, QUIET = 160, 20


class Walk:
    """Random operations on a site."""

    def __init__(self, site: Site, rng: random.Random) -> None:
        self.site = site
        self.rng = rng
        self.counts: Counter[str] = Counter()
        self.nodes: list[Node] = []
        for name, model, gpus in NODES:
            node = site.node(name, model, gpus)
            node.start()
            self.nodes.append(node)
        for node in self.nodes:
            site.until_ready(node)
        self._steps: tuple[tuple[Callable[[], str], float], ...] = (
            (self._allocate, 10),
            (self._release, 3.5),
            (self._foreign, 2),
            (self._foreign_goes, 1.5),
            (self._busy, 1.5),
            (self._decide, 1.5),
            (self._kill, 0.7),
            (self._cordon, 0.5),
        )

    def step(self) -> None:
        """Do one random operation."""
        steps, weights = zip(*self._steps, strict=True)
        (chosen,) = self.rng.choices(steps, weights)
        self.counts[chosen()] += 1
        self.site.restart_killed()

    def rest(self) -> None:
        """Wait until all work is done, and compare all views."""
        for node in self.nodes:
            self.site.ask("POST", f"/v1/nodes/{node.name}/uncordon")
            for one in node.machine.instances():
                if one.busy:
                    node.machine.set_idle(one.gpu, one.start)
        self.site.settle()
        self.counts["GPUs compared"] += sum(gpus for _, _, gpus in NODES)
        self.counts["instances compared"] += sum(len(n.machine.instances()) for n in self.nodes)

    # Operations

    def _allocate(self) -> str:
        body: dict[str, object] = {"profile": self.rng.choice(PROFILES)}
        body["count"] = self.rng.choice((1, 1, 1, 2, 3))
        if self.rng.random() < 0.3:
            body["wait_seconds"] = 600
        if self.rng.random() < 0.1:
            body["lease_seconds"] = 1
        status, _ = self.site.server.ask("POST", "/v1/allocations", body)
        return {201: "allocated", 202: "queued", 409: "no room"}[status]

    def _release(self) -> str:
        living = self.site.allocations()
        if not living:
            return "nothing to release"
        identity = self.rng.choice(living)["id"]
        status, _ = self.site.server.ask("DELETE", f"/v1/allocations/{identity}")
        return {200: "released", 404: "ended already"}[status]

    def _foreign(self) -> str:
        node = self.rng.choice(self.nodes)
        gpu = self.rng.choice(node.machine.gpus)
        model = next(model for name, model, _ in NODES if name == node.name)
        profile = self.rng.choice([p for p in load_geometry(model).profiles if p.size <= 4])
        try:
            node.create_foreign(gpu.index, profile.name, self.rng.choice(profile.starts))
        except PlacementError:  # it does not fit
            return "foreign does not fit"
        return "foreign created"

    def _foreign_goes(self) -> str:
        node = self.rng.choice(self.nodes)
        for one in node.machine.instances():
            if one.computes and one.computes[0].uuid in node.foreign:
                node.foreign.discard(one.computes[0].uuid)
                node.machine.destroy_instance(one.gpu, one.start)
                return "foreign destroyed by its owner"
        return "nothing foreign"

    def _busy(self) -> str:
        node = self.rng.choice(self.nodes)
        own = node.own_instances()
        if not own:
            return "nothing busy"
        one = self.rng.choice(own)
        try:
            node.machine.set_busy(one.gpu, one.start)
        except PlacementError:
            return "nothing busy"
        return "busy"

    def _decide(self) -> str:
        node = self.rng.choice(self.nodes)
        devices = self.site.detail(node.name)["devices"]
        names = [one["name"] for gpu in devices for one in gpu["foreign"] if one["uuid"]]
        if not names:
            return "nothing to decide"
        name = self.rng.choice(names)
        what = self.rng.choice(("adopt", "evict"))
        body = {"tenant": "default"} if what == "adopt" else None
        node.foreign.discard(name)
        path = f"/v1/nodes/{node.name}/foreign/{name}/{what}"
        status, _ = self.site.server.ask("POST", path, body)
        return {201: "adopted", 202: "evicted", 404: "gone already", 409: "not adopted"}[status]

    def _kill(self) -> str:
        self.rng.choice(self.nodes).kill()
        return "agent killed"

    def _cordon(self) -> str:
        node = self.rng.choice(self.nodes)
        self.site.ask("POST", f"/v1/nodes/{node.name}/cordon")
        return "cordoned"


def test_all_views_of_every_gpu_agree(
    open_site: OpenSite, seed: int, rounds: int, tell: Tell
) -> None:
    walk = Walk(open_site(), random.Random(seed))
    for number in range(OPERATIONS * rounds):
        walk.step()
        if number % QUIET == QUIET - 1:
            walk.rest()
    for one in walk.site.allocations():
        walk.site.release(one["id"])
    walk.rest()
    assert all(node.own_instances() == [] for node in walk.nodes)
    assert all(node.remaining_foreign() == node.foreign for node in walk.nodes)
    reasons = failures(walk.site)
    for reason in reasons:  # a foreign instance took the slices first
        assert "which is not ours (foreign)" in reason, reason
    tell(f"{OPERATIONS * rounds} operations: {dict(walk.counts)}; {len(reasons)} failed, explained")
