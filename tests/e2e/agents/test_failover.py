"""Two servers on one database: the leader dies or is paused, and agents turn to the other one."""

from __future__ import annotations

import random
import signal

from tests.e2e.agents.conftest import OpenSite
from tests.e2e.agents.site import SteadyServer
from tests.e2e.conftest import Tell
from tests.postgres import the_server

TURNS = ("kill", "stop", "pause")


def test_agents_follow_the_leader(open_site: OpenSite, seed: int, rounds: int, tell: Tell) -> None:
    rng = random.Random(seed)
    site = open_site("lease.seconds=1", database=the_server().database())
    leader = site.server
    other = SteadyServer(site.folder / "other", database=leader.database, settings=leader.settings)
    leader.lent_token = other.lent_token = leader.admin_token
    site.server_keeps_running = False
    other.start()
    try:
        node = site.node(gpus=2)
        node.put_foreign(0, "1g.18gb", 6)
        node.url = f"{other.url},{leader.url}"  # the first of them follows, and says who leads
        node.start()
        site.until_ready(node)
        held: list[str] = []
        for turn in TURNS * rounds:
            made = [site.allocate("1g.18gb")["id"] for _ in range(rng.randint(1, 3))]
            held += made
            if turn == "kill":
                leader.kill()
            elif turn == "stop":
                assert leader.stop() == 0
            else:
                leader.signal(signal.SIGSTOP)
            other.wait_until_ready("leading")
            site.server = other
            for identity in made:
                site.until_state(identity, "active")
            while len(held) > 2:
                site.release(held.pop(rng.randrange(len(held))))
            site.settle()
            if turn == "pause":
                leader.signal(signal.SIGCONT)
                leader.wait_until_ready("following")
            else:
                leader.start()
            leader, other = other, leader
        assert node.deaths == 0
        assert node.starts == 1
        assert node.foreign_left() == node.foreign
        tell(
            f"{len(TURNS) * rounds} leaders lost ({', '.join(TURNS)}): the agent turned to the "
            f"other each time, {len(node.own())} instances where the new leader says"
        )
    finally:
        for server in (leader, other):
            if server.runs:
                server.signal(signal.SIGCONT)
            server.kill()
