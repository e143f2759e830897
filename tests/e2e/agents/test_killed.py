"""Agents and the server are killed (-9) at every step of creating and destroying instances.

In the end hardware and server agree, and foreign instances are untouched.
``SLICEWISE_AGENT_ROUNDS`` is a factor for the length of the tests.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import product

from tests.e2e.agents.conftest import OpenSite
from tests.e2e.agents.site import Node, Site, failures
from tests.e2e.conftest import Tell

CHANGES = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
)
MOMENTS = ("before", "during", "after")
PROFILES = ("1g.18gb", "1g.18gb", "1g.18gb", "2g.35gb", "3g.71gb")
SAMPLE = 6
"""How many calls are killed by number, unless rounds are configured."""


def create_and_release(site: Site, profile: str = "2g.35gb") -> None:
    """Create and release an instance, whatever happens to the agent meanwhile."""
    made = site.allocate_soon(profile)
    seen = site.until_state(made["id"], "active", "failed")
    assert seen["state"] == "active", site.summary()
    site.release(made["id"])
    seen = site.until_state(made["id"], "released")


def start_node(site: Site, name: str = "gpu-07", gpus: int = 2) -> Node:
    """Create a node with foreign instances on every GPU, and start its agent."""
    node = site.node(name, gpus=gpus)
    for gpu in range(gpus):
        node.create_foreign(gpu, "1g.18gb", 6)
        node.create_foreign(gpu, "1g.18gb", 5)
    node.start()
    site.until_ready(node)
    site.settle()
    return node


def test_agent_killed_at_every_step(
    open_site: OpenSite, seed: int, rounds: int, tell: Tell
) -> None:
    site = open_site()
    node = start_node(site, gpus=1)
    node.machine.reset_calls()
    create_and_release(site)
    calls = {name: count for name, count in node.machine.calls().items() if count}
    assert set(CHANGES) <= set(calls)
    # Kill in the next call of every function that is used, and in calls by number.
    points: list[tuple[str, str, int]] = [
        (name, moment, 0)
        for name, moment in product(calls, MOMENTS)
        if name in CHANGES or moment != "during"
    ]
    if rounds == 1:  # for calls that only read, one moment of every second function suffices
        points = [p for n, p in enumerate(points) if p[0] in CHANGES or n % 4 == 0]
    total = sum(calls.values())
    numbers = range(total)
    chosen = numbers if rounds > 1 else sorted(random.Random(seed).sample(numbers, SAMPLE))
    points += [("*", "before", number) for number in chosen]
    kills: Counter[str] = Counter()
    for name, moment, after in points:
        fault = node.machine.kill(name, moment, after=after)
        before = node.deaths
        create_and_release(site)
        if not node.machine.hits(fault) and node.runs:
            # Some functions are called once per agent: restart it between creation and release.
            made = site.allocate_soon("2g.35gb")
            node.stop()
            node.start()
            site.until_state(made["id"], "active")
            site.release(made["id"])
            site.until_state(made["id"], "released")
        assert node.machine.hits(fault) == 1, f"{name} was not called"
        site.until(lambda: node.runs, "the agent is started again")
        site.settle()
        assert node.own_instances() == [], f"killed {moment} {name}"
        kills["changing" if name in CHANGES else "reading"] += 1
        assert node.deaths == before + 1, f"killed {moment} {name}"
        node.machine.clear_faults()
    assert node.remaining_foreign() == node.foreign
    assert failures(site) == []
    tell(
        f"{node.deaths} agents killed -9, {dict(kills)}: in {len({p[0] for p in points})} of "
        f"{len(calls)} functions, and "
        f"in {len(chosen)} of {total} calls by number; all instances created and released, "
        f"{len(node.foreign)} foreign instances untouched"
    )


class Load:
    """Random allocations and releases, which tolerate killed servers and agents."""

    def __init__(self, site: Site, rng: random.Random) -> None:
        self.site = site
        self.rng = rng
        self.mine: list[str] = []
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        """Send one request; an allocation without an answer is released at the end."""
        try:
            if self.mine and self.rng.random() < 0.03 * len(self.mine):
                chosen = self.mine.pop(self.rng.randrange(len(self.mine)))
                self.site.release(chosen)
                self.counts["released"] += 1
            else:
                profile = self.rng.choice(PROFILES)
                status, said = self.site.server.ask("POST", "/v1/allocations", {"profile": profile})
                self.counts["allocated" if status == 201 else "no room"] += 1
                if status == 201:
                    self.mine.append(said["id"])
        except OSError:
            self.counts["unanswered"] += 1
            self.site.restart_killed()

    def release_all(self) -> None:
        """Release all allocations."""
        for one in self.site.allocations():
            self.site.release(one["id"])
            self.counts["released"] += 1
        self.mine.clear()
        self.site.settle()


def test_killed_at_random_moments_under_load(
    open_site: OpenSite, seed: int, rounds: int, tell: Tell
) -> None:
    """Kill agents, the server, or both while requests arrive."""
    rng = random.Random(seed)
    site = open_site("agents.lost_seconds=5")
    nodes = [start_node(site, name, gpus=3) for name in ("n0", "n1")]
    for node, function in product(nodes, CHANGES):
        node.machine.delay(function, 15)  # so many are killed in the middle of a call
    load = Load(site, rng)
    kills: Counter[str] = Counter()
    for turn in range(12 * rounds):
        for _ in range(rng.randint(1, 8)):
            load.step()
        time.sleep(rng.random() * 0.1)
        victim = ("agent", "agent", "server", "both")[turn % 4]
        kills[victim] += 1
        if victim != "agent":
            site.server.kill()
        if victim != "server":
            rng.choice(nodes).kill()
        time.sleep(rng.random() * 0.05)
        site.restart_killed()
        if turn % 6 == 5:
            site.settle()
    site.settle()
    held = sum(len(node.own_instances()) for node in nodes)
    load.release_all()
    assert [node.own_instances() for node in nodes] == [[], []]
    assert all(node.remaining_foreign() == node.foreign for node in nodes)
    assert failures(site) == []
    tell(
        f"{dict(kills)} killed -9 ({sum(n.deaths for n in nodes)} agents, "
        f"{site.counts['server deaths']} servers restarted) under {dict(load.counts)}; "
        f"{held} instances at the end, as the server expects; "
        f"{sum(len(n.foreign) for n in nodes)} foreign ones untouched"
    )
