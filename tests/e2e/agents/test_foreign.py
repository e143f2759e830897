"""What is somebody else's: blocked, adopted, evicted; other agents; other managers; other rules."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.agents.conftest import OpenSite
from tests.e2e.agents.site import MODEL, Node, Site, failures
from tests.e2e.conftest import Tell
from tests.e2e.server import PATIENCE_SECONDS

from slicewise.catalog import load_entry
from slicewise.core.geometry import Profile
from slicewise.fakedriver import Machine


def strangers(site: Site, node: Node) -> dict[str, dict[str, Any]]:
    """By name: what the server knows to be nobody's."""
    devices = site.detail(node.name)["devices"]
    return {one["name"]: one for gpu in devices for one in gpu["foreign"]}


def test_blocked_adopted_and_evicted(site: Site, tell: Tell) -> None:
    node = site.node(gpus=1)
    early = node.put_foreign(0, "3g.71gb", 4)  # before anybody looked
    node.start()
    site.until_ready(node)
    site.settle()
    name = early.computes[0].uuid
    assert strangers(site, node)[name]["blocks"] is True
    first = site.until_state(site.allocate("3g.71gb")["id"], "active")
    assert first["start"] == 0
    status, said = site.server.ask("POST", "/v1/allocations", {"profile": "1g.18gb"})
    assert (status, said["reason"]) == (409, "capacity")
    site.release(first["id"])
    site.until_state(first["id"], "released")

    late = node.put_foreign(0, "2g.35gb", 0)  # while the agent looks
    site.until(lambda: late.computes[0].uuid in strangers(site, node), "the second is seen")
    small = site.until_state(site.allocate("1g.18gb")["id"], "active")
    assert small["start"] in (2, 3)
    site.settle()

    path = f"/v1/nodes/{node.name}/foreign/{name}"
    site.ask("POST", "/v1/tenants", {"name": "acme"}, status=201)
    mine = site.ask("POST", f"{path}/adopt", {"tenant": "acme"}, status=201)
    assert (mine["tenant"], mine["env"]) == ("acme", f"CUDA_VISIBLE_DEVICES={name}")
    site.settle()  # the agent has taken it into its record, and offers it to containers
    assert name not in strangers(site, node)
    assert site.allocation(mine["id"])["state"] == "active"
    node.kill()
    site.until(lambda: node.deaths == 1, "the agent is started again")
    site.settle()
    node.foreign.discard(name)
    site.release(mine["id"])
    site.until_state(mine["id"], "released")
    site.settle()

    other = late.computes[0].uuid
    node.machine.busy(0, 0)
    node.foreign.discard(other)
    gone = site.ask("POST", f"/v1/nodes/{node.name}/foreign/{other}/evict", status=202)
    assert gone["evicting"] is True
    assert strangers(site, node)[other]["evicting"] is True
    assert late in node.machine.instances() or node.machine.instances(0)[0].busy
    node.machine.idle(0, 0)
    site.until(lambda: other not in strangers(site, node), "it is gone")
    site.settle()
    assert [one.start for one in node.machine.instances()] == [small["start"]]
    tell("foreign: 2 blocked (1 before, 1 after the start), 1 adopted and released, 1 evicted")


def test_what_waits_goes_around_what_was_there_before_the_agent(
    open_site: OpenSite, tell: Tell
) -> None:
    """Whoever waits is served with the agent's first report, and not with its hello.

    With the hello it would meet what is foreign there every time: the agent leaves that alone, and
    the allocation fails.
    """
    site = open_site("agents.lost_seconds=1")
    node = site.node(gpus=1)
    node.put_foreign(0, "1g.18gb", 6)
    waits = site.allocate("3g.71gb", status=202, wait_seconds=600)
    node.start()
    seen = site.until_state(waits["id"], "active", "failed")
    assert (seen["state"], seen["start"]) == ("active", 0), seen["detail"]

    # Once more, at another start: what came while no agent was there.
    assert node.stop() == 0
    site.until(lambda: "unknown" in site.detail(node.name)["holds"], "the node is unknown")
    node.put_foreign(0, "1g.18gb", 4)
    waits = site.allocate("1g.18gb", status=202, wait_seconds=600)
    node.start()
    seen = site.until_state(waits["id"], "active", "failed")
    assert (seen["state"], seen["start"]) == ("active", 5), seen["detail"]
    site.settle()
    assert failures(site) == []
    assert node.foreign_left() == node.foreign
    tell("2 starts of an agent with requests waiting: both went around what was foreign there")


def test_a_foreign_instance_of_a_profile_nobody_knows(site: Site) -> None:
    """Without a compute instance it has no UUID; its place is its name."""
    node = site.node(gpus=2)
    node.machine.create_instance(0, "2g.35gb", 2, compute=False)
    node.start()
    site.until_ready(node)
    site.until(lambda: strangers(site, node), "it is seen")
    ((name, one),) = strangers(site, node).items()
    assert (one["uuid"], one["blocks"], name) == ("", True, "gpu0-2g.35gb-2")
    site.settle()
    status, said = site.server.ask(
        "POST", f"/v1/nodes/{node.name}/foreign/{name}/adopt", {"tenant": "default"}
    )
    assert (status, said["reason"]) == (409, "unusable")
    site.ask("POST", f"/v1/nodes/{node.name}/foreign/{name}/evict", status=202)
    site.until(lambda: not strangers(site, node), "it is gone")
    assert node.machine.instances() == ()


def test_our_instance_destroyed_by_somebody_else_is_made_again(site: Site) -> None:
    node = site.node(gpus=1)
    node.start()
    site.until_ready(node)
    made = site.until_state(site.allocate("2g.35gb")["id"], "active")
    node.machine.destroy_instance(0, made["start"])
    site.until(lambda: site.allocation(made["id"])["uuid"] not in ("", made["uuid"]), "again")
    site.settle()
    # Or somebody takes its very place: theirs is not touched, and the reason is told.
    node.machine.destroy_instance(0, made["start"])
    node.put_foreign(0, "2g.35gb", made["start"])
    seen = site.until_state(made["id"], "failed", "active")
    site.until(lambda: site.allocation(made["id"])["state"] == "failed", "it failed")
    seen = site.allocation(made["id"])
    assert "which is not ours (foreign)" in seen["detail"]
    site.until(lambda: not site.leaving(), "nothing is leaving")
    site.settle()


def _less_one(profile: Profile) -> Profile:
    """The profile as a driver might have it that does not offer its last start."""
    last = max(profile.starts)
    starts, preferred = (
        tuple(start for start in order if start != last)
        for order in (profile.starts, profile.preferred)
    )
    return replace(profile, starts=starts, preferred=preferred)


def test_geometry_that_is_not_ours_is_held_until_accepted(site: Site) -> None:
    entry = load_entry(MODEL)
    known = entry.require()
    profiles = tuple(_less_one(p) if p.name == "1g.18gb" else p for p in known.profiles)
    node = site.node(gpus=1)
    other = replace(entry, geometry=replace(known, profiles=profiles))
    node.machine = Machine.create(node.folder / "other", other, 1, seed=9)
    node.start()
    site.until_ready(node)
    told = site.detail(node.name)["holds"]["geometry"]
    assert "1g.18gb" in told
    status, said = site.server.ask("POST", "/v1/allocations", {"profile": "1g.18gb"})
    assert status == 409, said
    site.ask("POST", f"/v1/nodes/{node.name}/accept")
    detail = site.detail(node.name)
    assert "geometry" not in detail["holds"]
    assert detail["model"].startswith(f"{MODEL}~")
    made = [site.allocate("1g.18gb") for _ in range(6)]
    seen = {site.until_state(one["id"], "active")["start"] for one in made}
    assert seen == {0, 1, 2, 3, 4, 5}
    site.settle()
    node.kill()  # accepted once is accepted
    site.until(lambda: node.deaths == 1, "the agent is started again")
    site.until_ready(node)
    assert "geometry" not in site.detail(node.name)["holds"]
    site.settle()


def test_one_agent_a_node(site: Site) -> None:
    node = site.node(gpus=1)
    first = node.start()
    site.until_ready(node)
    made = site.until_state(site.allocate("1g.18gb")["id"], "active")
    node.keeps_running = False
    second = node.start()
    assert second.wait(PATIENCE_SECONDS) == 2
    assert f"an agent is already at work on this node: process {first.pid} holds" in node.told()
    assert first.poll() is None
    state, node.state = node.state, node.folder / "state-2"
    assert node.start().wait(PATIENCE_SECONDS) == 2, "the node is taken, not only the folder"
    # One elsewhere that shares the token takes over: nothing there tells it of the first.
    elsewhere = node.folder / "root-2"
    shutil.copytree(node.machine.root, elsewhere)
    node.prefix = ("env", f"SLICEWISE_HOST_ROOT={elsewhere}")
    third = node.start()
    assert first.wait(PATIENCE_SECONDS) == 3
    assert "another agent has taken over this node" in node.told()
    # It knows the instance by the UUID that the server tells it.
    site.settle()
    assert site.allocation(made["id"])["uuid"] == made["uuid"]
    assert third.poll() is None
    assert state != node.state


def test_another_manager_is_refused_by_name(site: Site, tmp_path: Path) -> None:
    name = f"mig-{secrets.token_hex(5)}"  # A real agent on this host must not mind it.
    node = site.node(gpus=1)

    def begin() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, str(script)])
        (node.machine.root / "proc" / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        return process

    node.variables["HURRIED_MANAGER"] = name
    script = tmp_path / name
    script.write_text("import time\ntime.sleep(600)\n")
    with begin() as other:
        try:
            node.keeps_running = False
            assert node.start().wait(PATIENCE_SECONDS) == 2
            assert f"another MIG manager is at work on this node: {name}" in node.told()
            assert f"process {other.pid}" in node.told()
            # Named on purpose, it is ignored.
            node.start("--ignore-manager", name)
            site.until_ready(node)
            assert node.stop() == 0
        finally:
            other.kill()
    # One that begins later: nothing is made while it is there.
    node.start()
    site.until_ready(node)

    def held() -> str:
        return str(site.detail(node.name)["devices"][0]["holds"])

    with begin() as other:
        try:
            site.until(lambda: name in held(), "the GPU is held")
            status, _ = site.server.ask("POST", "/v1/allocations", {"profile": "1g.18gb"})
            assert status == 409
            assert node.machine.instances() == ()
        finally:
            other.kill()
    site.until(lambda: held() == "{}", "the GPU is free again")
    site.until_state(site.allocate("1g.18gb")["id"], "active")


@pytest.mark.parametrize("moment", ["adopt", "evict"])
def test_killed_while_an_operator_decides(moment: str, site: Site) -> None:
    node = site.node(gpus=1)
    mine, other = node.put_foreign(0, "1g.18gb", 0), node.put_foreign(0, "1g.18gb", 1)
    node.start()
    site.until_ready(node)
    site.settle()
    name = mine.computes[0].uuid
    path = f"/v1/nodes/{node.name}/foreign/{name}/{moment}"
    deaths = 0
    for function in ("nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"):
        node.machine.kill(function, "after")
        deaths += 1
    node.foreign.discard(name)
    if moment == "evict":
        site.ask("POST", path, status=202)
    else:
        made = site.ask("POST", path, {"tenant": "default"}, status=201)
        node.kill()
        deaths += 1
        site.release(made["id"])
        site.until_state(made["id"], "released")
    site.until(lambda: name not in strangers(site, node), "it is gone")
    site.settle()
    assert node.machine.instances() == (other,)
    assert node.deaths == deaths
