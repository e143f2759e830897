"""Operations: draining a node, restoring the server from a backup."""

from __future__ import annotations

import shutil

import pytest
from tests.e2e.agents.site import Site
from tests.e2e.agents.test_foreign import foreign_instances
from tests.e2e.agents.test_killed import start_node


def test_node_is_drained_when_its_instances_are_gone(site: Site) -> None:
    node = start_node(site, gpus=1)
    made = site.until_state(site.allocate("2g.35gb")["id"], "active")
    node.machine.set_busy(0, made["start"])
    site.ask("POST", f"/v1/nodes/{node.name}/drain", {"evict": True})
    assert site.detail(node.name)["state"] == "draining"
    site.until(lambda: "in use" in str(site.allocation(made["id"])), "it is in use")
    assert site.detail(node.name)["state"] == "draining"
    node.machine.set_idle(0, made["start"])
    site.until(lambda: site.detail(node.name)["state"] == "drained", "it is drained")
    assert node.own_instances() == []
    assert site.until_state(made["id"], "released")["cause"] == "evicted"
    site.settle()


@pytest.mark.parametrize("session", ["the same session", "another session"])
def test_instance_missing_in_a_restored_backup_is_not_destroyed(session: str, site: Site) -> None:
    """A backup from before an instance was created makes it a stray, which is not touched."""
    node = start_node(site, gpus=1)
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
    # The backup may not know the session: the agent sends hello again and continues.
    pid = node.process.pid
    site.server.start()
    site.until(lambda: late["uuid"] in foreign_instances(site, node), "the instance is a stray")
    assert (node.process.pid, node.process.poll()) == (pid, None)
    stray = foreign_instances(site, node)[late["uuid"]]
    assert (stray["why"], stray["blocks"]) == ("stray", True)
    # An instance released since the backup is desired again, and recreated.
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
