"""Foreign instances, other agents, other MIG managers, other geometries."""

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


def foreign_instances(site: Site, node: Node) -> dict[str, dict[str, Any]]:
    """The foreign instances that the server knows, by name."""
    devices = site.detail(node.name)["devices"]
    return {one["name"]: one for gpu in devices for one in gpu["foreign"]}


def test_blocked_adopted_and_evicted(site: Site, tell: Tell) -> None:
    node = site.node(gpus=1)
    early = node.create_foreign(0, "3g.71gb", 4)  # before the agent starts
    node.start()
    site.until_ready(node)
    site.settle()
    name = early.computes[0].uuid
    assert foreign_instances(site, node)[name]["blocks"] is True
    first = site.until_state(site.allocate("3g.71gb")["id"], "active")
    assert first["start"] == 0
    status, said = site.server.ask("POST", "/v1/allocations", {"profile": "1g.18gb"})
    assert (status, said["reason"]) == (409, "capacity")
    site.release(first["id"])
    site.until_state(first["id"], "released")

    late = node.create_foreign(0, "2g.35gb", 0)  # while the agent runs
    site.until(
        lambda: late.computes[0].uuid in foreign_instances(site, node), "the second one is reported"
    )
    small = site.until_state(site.allocate("1g.18gb")["id"], "active")
    assert small["start"] in (2, 3)
    site.settle()

    path = f"/v1/nodes/{node.name}/foreign/{name}"
    site.ask("POST", "/v1/tenants", {"name": "acme"}, status=201)
    mine = site.ask("POST", f"{path}/adopt", {"tenant": "acme"}, status=201)
    assert (mine["tenant"], mine["env"]) == ("acme", f"CUDA_VISIBLE_DEVICES={name}")
    site.settle()  # the agent has recorded it and written its CDI file
    assert name not in foreign_instances(site, node)
    assert site.allocation(mine["id"])["state"] == "active"
    node.kill()
    site.until(lambda: node.deaths == 1, "the agent is started again")
    site.settle()
    node.foreign.discard(name)
    site.release(mine["id"])
    site.until_state(mine["id"], "released")
    site.settle()

    other = late.computes[0].uuid
    node.machine.set_busy(0, 0)
    node.foreign.discard(other)
    gone = site.ask("POST", f"/v1/nodes/{node.name}/foreign/{other}/evict", status=202)
    assert gone["evicting"] is True
    assert foreign_instances(site, node)[other]["evicting"] is True
    assert late in node.machine.instances() or node.machine.instances(0)[0].busy
    node.machine.set_idle(0, 0)
    site.until(lambda: other not in foreign_instances(site, node), "it is destroyed")
    site.settle()
    assert [one.start for one in node.machine.instances()] == [small["start"]]
    tell("foreign: 2 blocked (1 before, 1 after the start), 1 adopted and released, 1 evicted")


def test_waiting_requests_avoid_foreign_instances(open_site: OpenSite, tell: Tell) -> None:
    """Waiting requests are placed after the agent's first report, not after its hello.

    After the hello, foreign instances are unknown: an allocation could get their slices and fail.
    """
    site = open_site("agents.lost_seconds=1")
    node = site.node(gpus=1)
    node.create_foreign(0, "1g.18gb", 6)
    waits = site.allocate("3g.71gb", status=202, wait_seconds=600)
    node.start()
    seen = site.until_state(waits["id"], "active", "failed")
    assert (seen["state"], seen["start"]) == ("active", 0), seen["detail"]

    # Again with a foreign instance that was created while no agent was running.
    assert node.stop() == 0
    site.until(lambda: "unknown" in site.detail(node.name)["holds"], "the node is unknown")
    node.create_foreign(0, "1g.18gb", 4)
    waits = site.allocate("1g.18gb", status=202, wait_seconds=600)
    node.start()
    seen = site.until_state(waits["id"], "active", "failed")
    assert (seen["state"], seen["start"]) == ("active", 5), seen["detail"]
    site.settle()
    assert failures(site) == []
    assert node.remaining_foreign() == node.foreign
    tell("2 starts of an agent with waiting requests: both avoided the foreign instances")


def test_foreign_instance_without_compute_instance(site: Site) -> None:
    """Without a compute instance it has no UUID, and is named by its placement."""
    node = site.node(gpus=2)
    node.machine.create_instance(0, "2g.35gb", 2, compute=False)
    node.start()
    site.until_ready(node)
    site.until(lambda: foreign_instances(site, node), "it is reported")
    ((name, one),) = foreign_instances(site, node).items()
    assert (one["uuid"], one["blocks"], name) == ("", True, "gpu0-2g.35gb-2")
    site.settle()
    status, said = site.server.ask(
        "POST", f"/v1/nodes/{node.name}/foreign/{name}/adopt", {"tenant": "default"}
    )
    assert (status, said["reason"]) == (409, "unusable")
    site.ask("POST", f"/v1/nodes/{node.name}/foreign/{name}/evict", status=202)
    site.until(lambda: not foreign_instances(site, node), "it is destroyed")
    assert node.machine.instances() == ()


def test_instance_destroyed_by_another_program_is_recreated(site: Site) -> None:
    node = site.node(gpus=1)
    node.start()
    site.until_ready(node)
    made = site.until_state(site.allocate("2g.35gb")["id"], "active")
    node.machine.destroy_instance(0, made["start"])
    site.until(
        lambda: site.allocation(made["id"])["uuid"] not in ("", made["uuid"]), "it is recreated"
    )
    site.settle()
    # A foreign instance in its place is not touched, and the reason is reported.
    node.machine.destroy_instance(0, made["start"])
    node.create_foreign(0, "2g.35gb", made["start"])
    seen = site.until_state(made["id"], "failed", "active")
    site.until(lambda: site.allocation(made["id"])["state"] == "failed", "it fails")
    seen = site.allocation(made["id"])
    assert "which is not ours (foreign)" in seen["detail"]
    site.until(lambda: not site.releasing(), "nothing is releasing")
    site.settle()


def _without_last_start(profile: Profile) -> Profile:
    """The profile without its last start, as another driver might offer it."""
    last = max(profile.starts)
    starts, preferred = (
        tuple(start for start in order if start != last)
        for order in (profile.starts, profile.preferred)
    )
    return replace(profile, starts=starts, preferred=preferred)


def test_unknown_geometry_is_held_until_accepted(site: Site) -> None:
    entry = load_entry(MODEL)
    known = entry.require()
    profiles = tuple(_without_last_start(p) if p.name == "1g.18gb" else p for p in known.profiles)
    node = site.node(gpus=1)
    other = replace(entry, geometry=replace(known, profiles=profiles))
    node.machine = Machine.create(node.folder / "other", other, 1, seed=9)
    node.start()
    site.until_ready(node)
    assert "1g.18gb" in site.detail(node.name)["holds"]["geometry"]
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
    node.kill()  # the acceptance survives a restart
    site.until(lambda: node.deaths == 1, "the agent is started again")
    site.until_ready(node)
    assert "geometry" not in site.detail(node.name)["holds"]
    site.settle()


def test_one_agent_per_node(site: Site) -> None:
    node = site.node(gpus=1)
    first = node.start()
    site.until_ready(node)
    made = site.until_state(site.allocate("1g.18gb")["id"], "active")
    node.restarts = False
    second = node.start()
    assert second.wait(PATIENCE_SECONDS) == 2
    assert f"an agent is already running on this node: process {first.pid} holds" in node.log_tail()
    assert first.poll() is None
    state, node.state = node.state, node.folder / "state-2"
    assert node.start().wait(PATIENCE_SECONDS) == 2, "the node is locked, not only the folder"
    # An agent on another host with the same token takes over.
    elsewhere = node.folder / "root-2"
    shutil.copytree(node.machine.root, elsewhere)
    node.prefix = ("env", f"SLICEWISE_HOST_ROOT={elsewhere}")
    third = node.start()
    assert first.wait(PATIENCE_SECONDS) == 3
    assert "another agent has taken over this node" in node.log_tail()
    # It recognizes the instance by the UUID from the server.
    site.settle()
    assert site.allocation(made["id"])["uuid"] == made["uuid"]
    assert third.poll() is None
    assert state != node.state


def test_other_mig_manager_is_refused(site: Site, tmp_path: Path) -> None:
    name = f"mig-{secrets.token_hex(5)}"  # Unknown to a real agent on this host.
    node = site.node(gpus=1)

    def begin() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, str(script)])
        (node.machine.root / "proc" / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        return process

    node.variables["FAST_AGENT_MANAGER"] = name
    script = tmp_path / name
    script.write_text("import time\ntime.sleep(600)\n")
    with begin() as other:
        try:
            node.restarts = False
            assert node.start().wait(PATIENCE_SECONDS) == 2
            assert f"another MIG manager is running on this node: {name}" in node.log_tail()
            assert f"process {other.pid}" in node.log_tail()
            # --ignore-manager permits it.
            node.start("--ignore-manager", name)
            site.until_ready(node)
            assert node.stop() == 0
        finally:
            other.kill()
    # A manager that starts later: nothing is created while it runs.
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
    site.until(lambda: held() == "{}", "the hold ends")
    site.until_state(site.allocate("1g.18gb")["id"], "active")


@pytest.mark.parametrize("moment", ["adopt", "evict"])
def test_killed_during_adoption_or_eviction(moment: str, site: Site) -> None:
    node = site.node(gpus=1)
    mine, other = node.create_foreign(0, "1g.18gb", 0), node.create_foreign(0, "1g.18gb", 1)
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
    site.until(lambda: name not in foreign_instances(site, node), "it is destroyed")
    site.settle()
    assert node.machine.instances() == (other,)
    assert node.deaths == deaths
