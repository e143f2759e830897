"""The lifecycle of an instance as seen by API, CLI, events and hardware."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tests.e2e.agents.site import Site
from tests.e2e.conftest import Tell


def cli(site: Site, *arguments: str) -> str:
    """Run a `slicewise` command and return its output."""
    token = site.folder / "admin"
    token.write_text(site.server.admin_token)
    where = ("--server", site.server.url, "--token-file", str(token))
    done = subprocess.run(
        [sys.executable, "-m", "slicewise.cli", *arguments, *where],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def phases(site: Site, allocation: str) -> list[str]:
    """The phases of an allocation, from the audit log."""
    entries = [event["entry"] for event in site.events() if event["kind"] == "part-turned"]
    return [e["phase"] for e in reversed(entries) if e["allocation"] == allocation]


@pytest.mark.parametrize("model", ["H200-141GB", "A30-24GB"])
def test_from_request_to_release(model: str, site: Site, tell: Tell) -> None:
    first = model == "H200-141GB"  # with the default intervals, and with the CLI
    node = site.node(model=model)
    small = "1g.18gb" if first else "1g.6gb"
    foreign = node.create_foreign(1, small, 0)
    node.start(fast=not first)
    site.until_ready(node)
    detail = site.detail(node.name)
    assert (detail["managed"], detail["model"], detail["gpus"]) == (True, model, 2)
    assert [gpu["uuid"] for gpu in detail["devices"]] == [gpu.uuid for gpu in node.machine.gpus]
    site.settle()  # the foreign instance is known and blocks its slices

    node.machine.delay("nvmlGpuInstanceCreateComputeInstance", 1500)
    made = site.allocate(small)
    assert (made["state"], made["phase"], made["uuid"]) == ("placed", "placed", "")
    site.until_state(made["id"], "creating")
    seen = site.until_state(made["id"], "active")
    (mine,) = node.own_instances()
    (compute,) = mine.computes
    assert (mine.gpu, mine.profile, mine.start) == (seen["gpu"], small, seen["start"])
    assert seen["uuid"] == compute.uuid != foreign.computes[0].uuid
    assert seen["env"] == f"CUDA_VISIBLE_DEVICES={compute.uuid}"
    assert seen["cdi"] == f"slicewise.dev/mig={compute.uuid}"
    assert seen["gpu_uuid"] == node.machine.gpus[mine.gpu].uuid
    (file,) = node.cdi.glob("*.json")
    spec = json.loads(file.read_text())
    assert (spec["kind"], spec["devices"][0]["name"]) == ("slicewise.dev/mig", compute.uuid)
    site.settle()
    if first:
        shown = cli(site, "show", made["id"])
        assert "state active" in shown
        assert seen["env"] in shown
        shown = cli(site, "nodes", "show", node.name)
        assert f"{small}@{mine.start}" in shown
        assert node.machine.gpus[0].uuid in shown
        assert foreign.computes[0].uuid in cli(site, "nodes", "foreign", node.name)
        assert made["id"] in cli(site, "ls", "--state", "active")

    node.machine.set_busy(mine.gpu, mine.start)  # until the release was seen
    ended = site.release(made["id"])
    assert (ended["state"], ended["phase"]) == ("releasing", "releasing")
    if first:
        assert "state releasing" in cli(site, "show", made["id"])
        assert made["id"] in cli(site, "ls", "--state", "releasing")
    site.until(lambda: "in use" in _detail(site, made["id"]), "the reason is reported")
    node.machine.set_idle(mine.gpu, mine.start)
    assert site.until_state(made["id"], "released")["cause"] == "released"
    assert node.machine.instances() == (foreign,)
    site.settle()
    assert list(node.cdi.glob("*.json")) == []
    seen_phases = phases(site, made["id"])
    assert list(dict.fromkeys(seen_phases)) == ["creating", "active", "releasing", "gone"]
    if first:
        count = len(site.events())
        printed = cli(site, "events", "--after", "0", "--count", str(count))
        for word in ("agent-joined", "foreign-seen", f"is active {compute.uuid}", "is gone"):
            assert word in printed
        assert "state released" in cli(site, "show", made["id"])
    assert node.stop() == 0
    calls = {name: n for name, n in node.machine.calls().items() if n}
    tell(f"{model}: one instance, {sum(calls.values())} calls of {len(calls)} driver functions")


def _detail(site: Site, identity: str) -> str:
    (part,) = site.allocation(identity)["instances"]
    return str(part.get("detail", ""))


def test_instances_on_several_nodes(site: Site) -> None:
    nodes = [site.node(f"n{number}", gpus=1) for number in range(2)]
    for node in nodes:
        node.start()
    for node in nodes:
        site.until_ready(node)
    made: dict[str, Any] = site.allocate("7g.141gb", count=2)
    seen = site.until_state(made["id"], "active")
    assert {part["node"] for part in seen["instances"]} == {"n0", "n1"}
    assert len({part["env"] for part in seen["instances"]}) == 2
    site.settle()
    site.release(made["id"])
    site.until_state(made["id"], "released")
    site.settle()
    assert [node.machine.instances() for node in nodes] == [(), ()]
