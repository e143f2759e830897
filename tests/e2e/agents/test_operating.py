"""What operators do: draining a node, and a server that forgot what it knew."""

from __future__ import annotations

import shutil

import pytest
from tests.e2e.agents.site import Site
from tests.e2e.agents.test_foreign import strangers
from tests.e2e.agents.test_killed import furnished


def test_a_node_is_drained_when_its_hardware_is_empty(site: Site) -> None:
    node = furnished(site, gpus=1)
    made = site.until_state(site.allocate("2g.35gb")["id"], "active")
    node.machine.busy(0, made["start"])
    site.ask("POST", f"/v1/nodes/{node.name}/drain", {"evict": True})
    assert site.detail(node.name)["state"] == "draining"
    site.until(lambda: "in use" in str(site.allocation(made["id"])), "it is in use")
    assert site.detail(node.name)["state"] == "draining"
    node.machine.idle(0, made["start"])
    site.until(lambda: site.detail(node.name)["state"] == "drained", "it is drained")
    assert node.own() == []
    assert site.until_state(made["id"], "released")["cause"] == "evicted"
    site.settle()


@pytest.mark.parametrize("session", ["the same session", "another session"])
def test_a_server_that_forgot_an_instance_does_not_destroy_it(session: str, site: Site) -> None:
    """Restored from what was kept before an instance was made: it is a stray, and left alone."""
    node = furnished(site, gpus=1)
    early = site.until_state(site.allocate("1g.18gb")["id"], "active")
    assert site.server.stop() == 0
    kept = site.folder / "kept"
    shutil.copytree(site.server.data, kept)
    site.server.start()
    if session == "another session":
        node.kill()
        site.until_ready(node)
    late = site.until_state(site.allocate("2g.35gb")["id"], "active")
    site.release(early["id"])
    site.until_state(early["id"], "released")
    site.server.kill()
    shutil.rmtree(site.server.data)
    shutil.copytree(kept, site.server.data)
    # Its session began after what was kept: the agent says hello again, and goes on.
    pid = node.process.pid
    site.server.start()
    site.until(lambda: late["uuid"] in strangers(site, node), "the instance is nobody's")
    assert (node.process.pid, node.process.poll()) == (pid, None)
    stray = strangers(site, node)[late["uuid"]]
    assert (stray["why"], stray["blocks"]) == ("stray", True)
    # What was released meanwhile is wanted again, and made again.
    site.until(lambda: site.allocation(early["id"])["uuid"] not in ("", early["uuid"]), "again")
    assert any(one.computes[0].uuid == late["uuid"] for one in node.machine.instances())
    mine = site.ask(
        "POST",
        f"/v1/nodes/{node.name}/foreign/{late['uuid']}/adopt",
        {"tenant": "default"},
        status=201,
    )
    site.settle()
    site.release(mine["id"])
    site.until_state(mine["id"], "released")
    site.settle()
