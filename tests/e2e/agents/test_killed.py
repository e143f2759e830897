"""kill -9: of agents at every step of creating and destroying, of the server, of both.

In the end the hardware is what the server says, nothing is left over, and what is somebody else's
was not touched. ``SLICEWISE_AGENT_ROUNDS`` says how much longer than usual.
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
SAMPLE = 12
"""Of all the calls of a life, so many are struck in an ordinary run."""


def life(site: Site, profile: str = "2g.35gb") -> None:
    """An instance is made, used and released, whatever happens to the agent meanwhile."""
    made = site.allocate_soon(profile)
    seen = site.until_state(made["id"], "active", "failed")
    assert seen["state"] == "active", site.told()
    site.release(made["id"])
    seen = site.until_state(made["id"], "released")


def furnished(site: Site, name: str = "gpu-07", gpus: int = 2) -> Node:
    """A node with instances of somebody else's on every GPU, and its agent at work."""
    node = site.node(name, gpus=gpus)
    for gpu in range(gpus):
        node.put_foreign(gpu, "1g.18gb", 6)
        node.put_foreign(gpu, "1g.18gb", 5)
    node.start()
    site.until_ready(node)
    site.settle()
    return node


def test_agent_killed_at_every_step(
    open_site: OpenSite, seed: int, rounds: int, tell: Tell
) -> None:
    site = open_site()
    node = furnished(site, gpus=1)
    node.machine.forget_calls()
    life(site)
    calls = {name: count for name, count in node.machine.calls().items() if count}
    assert set(CHANGES) <= set(calls)
    # Every function that a life calls, struck at its next call; and calls by their number.
    points: list[tuple[str, str, int]] = [
        (name, moment, 0)
        for name, moment in product(calls, MOMENTS)
        if name in CHANGES or moment != "during"
    ]
    if rounds == 1:  # of what only reads, one moment is as good as the other
        points = [p for n, p in enumerate(points) if p[0] in CHANGES or n % 2 == 0]
    total = sum(calls.values())
    numbers = range(total)
    chosen = numbers if rounds > 1 else sorted(random.Random(seed).sample(numbers, SAMPLE))
    points += [("*", "before", number) for number in chosen]
    struck: Counter[str] = Counter()
    for name, moment, after in points:
        fault = node.machine.kill(name, moment, after=after)
        before = node.deaths
        life(site)
        if not node.machine.struck(fault) and node.runs:
            # What an agent reads but once is read by the next one: another life, in two halves.
            made = site.allocate_soon("2g.35gb")
            node.stop()
            node.start()
            site.until_state(made["id"], "active")
            site.release(made["id"])
            site.until_state(made["id"], "released")
        assert node.machine.struck(fault) == 1, f"{name} was not struck {moment}"
        site.until(lambda: node.runs, "the agent is started again")
        site.settle()
        assert node.own() == [], f"killed {moment} {name}"
        struck["of changes" if name in CHANGES else "of readings"] += 1
        assert node.deaths == before + 1, f"once killed {moment} {name}"
        node.machine.heal()
    assert node.foreign_left() == node.foreign
    assert failures(site) == []
    tell(
        f"{node.deaths} agents killed -9, {dict(struck)}: every function of {len(calls)} that a "
        f"life calls, and {len(chosen)} of its {total} calls by number; all lives ended, "
        f"{len(node.foreign)} foreign instances untouched"
    )


class Crowd:
    """Requests and releases at random, which go on whatever dies."""

    def __init__(self, site: Site, rng: random.Random) -> None:
        self.site = site
        self.rng = rng
        self.mine: list[str] = []
        self.counts: Counter[str] = Counter()

    def step(self) -> None:
        """One call; one that the server did not answer is nobody's loss, and found at the end."""
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
            self.site.revive()

    def leave(self) -> None:
        """Release everything there is."""
        for one in self.site.living():
            self.site.release(one["id"])
            self.counts["released"] += 1
        self.mine.clear()
        self.site.settle()


def test_killed_at_random_moments_under_load(
    open_site: OpenSite, seed: int, rounds: int, tell: Tell
) -> None:
    """Agents, the server, and both, while requests come and go."""
    rng = random.Random(seed)
    site = open_site("agents.lost_seconds=5")
    nodes = [furnished(site, name, gpus=3) for name in ("n0", "n1")]
    for node, function in product(nodes, CHANGES):
        node.machine.delay(function, 15)  # so that many die in the middle of something
    crowd = Crowd(site, rng)
    kills: Counter[str] = Counter()
    for turn in range(12 * rounds):
        for _ in range(rng.randint(1, 8)):
            crowd.step()
        time.sleep(rng.random() * 0.1)
        victim = ("agent", "agent", "server", "both")[turn % 4]
        kills[victim] += 1
        if victim != "agent":
            site.server.kill()
        if victim != "server":
            rng.choice(nodes).kill()
        time.sleep(rng.random() * 0.05)
        site.revive()
        if turn % 6 == 5:
            site.settle()
    site.settle()
    held = sum(len(node.own()) for node in nodes)
    crowd.leave()
    assert [node.own() for node in nodes] == [[], []]
    assert all(node.foreign_left() == node.foreign for node in nodes)
    assert failures(site) == []
    tell(
        f"{dict(kills)} killed -9 ({sum(n.deaths for n in nodes)} agents, "
        f"{site.counts['server deaths']} servers started again) under {dict(crowd.counts)}; "
        f"{held} instances at the end, each where the server says; "
        f"{sum(len(n.foreign) for n in nodes)} foreign ones untouched"
    )
