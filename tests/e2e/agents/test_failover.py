"""Two servers on one database: when the leader fails, agents switch to the other server."""

from __future__ import annotations

import random
import signal

from tests.e2e.agents.conftest import OpenSite
from tests.e2e.agents.site import SteadyServer
from tests.e2e.conftest import Tell
from tests.postgres import the_server

FAILURES = ("kill", "stop", "pause")


def test_agents_follow_the_leader(open_site: OpenSite, seed: int, rounds: int, tell: Tell) -> None:
    rng = random.Random(seed)
    site = open_site("lease.seconds=1", database=the_server().database())
    leader = site.server
    other = SteadyServer(site.folder / "other", database=leader.database, settings=leader.settings)
    leader.lent_token = other.lent_token = leader.admin_token
    site.restart_server = False
    other.start()
    try:
        node = site.node(gpus=2)
        node.create_foreign(0, "1g.18gb", 6)
        node.url = f"{other.url},{leader.url}"  # the first one follows, and names the leader
        node.start()
        site.until_ready(node)
        held: list[str] = []
        for failure in FAILURES * rounds:
            made = [site.allocate("1g.18gb")["id"] for _ in range(rng.randint(1, 3))]
            held += made
            if failure == "kill":
                leader.kill()
            elif failure == "stop":
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
            if failure == "pause":
                leader.signal(signal.SIGCONT)
                leader.wait_until_ready("following")
            else:
                leader.start()
            leader, other = other, leader
        assert node.deaths == 0
        assert node.starts == 1
        assert node.remaining_foreign() == node.foreign
        tell(
            f"{len(FAILURES) * rounds} leaders lost ({', '.join(FAILURES)}): the agent followed "
            f"each time, {len(node.own_instances())} instances as the new leader expects"
        )
    finally:
        for server in (leader, other):
            if server.runs:
                server.signal(signal.SIGCONT)
            server.kill()
