"""Driver calls that fail once or forever, and unhealthy hardware.

In the end the hardware matches the desired state, or a message explains why it does not.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.e2e.agents.conftest import OpenSite
from tests.e2e.agents.site import Node, Site
from tests.e2e.agents.test_killed import CHANGES, create_and_release, start_node
from tests.e2e.conftest import Tell

NOT_SUPPORTED, TIMEOUT, LOST, IN_USE, RESOURCES, UNKNOWN = 3, 10, 15, 19, 23, 999
CODES = {
    NOT_SUPPORTED: "NOT_SUPPORTED",
    TIMEOUT: "TIMEOUT",
    LOST: "GPU_IS_LOST",
    IN_USE: "IN_USE",
    RESOURCES: "INSUFFICIENT_RESOURCES",
    UNKNOWN: "UNKNOWN",
}
MESSAGE = re.compile(r"[a-z].{15,}")


def part(site: Site, identity: str) -> dict[str, Any]:
    """The instance of an allocation that has one."""
    (found,) = site.allocation(identity)["instances"]
    return dict(found)


def holds(site: Site, node: Node, gpu: int) -> dict[str, str]:
    """The holds of a GPU."""
    found: dict[str, str] = site.detail(node.name)["devices"][gpu]["holds"]
    return found


def attempt(site: Site, node: Node) -> str:
    """Create and release an instance under faults, and return the outcome.

    Failures must be explained. Afterwards the faults are cleared, and all work must complete.
    """
    before = site.detail(node.name)
    status, said = site.server.ask("POST", "/v1/allocations", {"profile": "2g.35gb"})
    if status != 201:  # the GPU was already held, or its agent has just started
        assert status == 409, said
        restarted = before["agent"]["session"] != site.detail(node.name)["agent"]["session"]
        held = any(holds(site, node, gpu.index) for gpu in node.machine.gpus)
        assert held or restarted or "unreported" in before["holds"], site.summary()
        node.machine.clear_faults()
        site.until(
            lambda: not any(holds(site, node, g.index) for g in node.machine.gpus), "holds end"
        )
        return "held"
    identity = said["id"]
    seen = site.until_state(identity, "active", "failed")
    if seen["state"] == "failed":
        assert MESSAGE.search(seen["detail"]), seen
        assert "could not be created" in seen["detail"]
        outcome = "failed with a reason"
    else:
        site.release(identity)
        outcome = "created and released"

        def over() -> bool:
            one = site.allocation(identity)
            if one["state"] == "released":
                return True
            return bool(one["instances"][0]["phase"] == "quarantined")

        site.until(over, "it is released or quarantined")
        if part(site, identity)["phase"] == "quarantined":
            assert MESSAGE.search(part(site, identity)["detail"])
            outcome = "quarantined with a reason, then released"
    node.machine.clear_faults()
    site.until(lambda: not site.releasing(), "nothing is releasing")
    site.until(lambda: not any(holds(site, node, g.index) for g in node.machine.gpus), "holds end")
    site.settle()
    return outcome


def test_every_call_fails_with_many_codes(
    open_site: OpenSite, seed: int, rounds: int, tell: Tell
) -> None:
    rng = random.Random(seed)
    site = open_site()
    node = start_node(site, gpus=1)
    node.machine.reset_calls()
    create_and_release(site)
    called = [name for name, count in node.machine.calls().items() if count]
    points = [
        (name, code, times, done)
        for name in called
        for code in CODES
        for times in (1, None)
        for done in ((False, True) if name in CHANGES and times == 1 else (False,))
    ]
    if rounds == 1:
        changes = [p for p in points if p[0] in CHANGES]
        others = [p for p in points if p[0] not in CHANGES]
        points = rng.sample(changes, 16) + rng.sample(others, 10)
    outcomes: Counter[str] = Counter()
    applied = 0
    for name, code, times, done in points:
        fault = node.machine.fail(name, code, times=times, done=done)
        outcomes[attempt(site, node)] += 1
        applied += node.machine.hits(fault) > 0
        site.settle()
        assert node.own_instances() == [], f"{name} {code} {times} {done}"
    assert node.remaining_foreign() == node.foreign
    assert outcomes["created and released"] > 0
    tell(
        f"{len(points)} faults ({len(called)} functions, {len(CODES)} codes, once and forever), "
        f"{applied} applied: {dict(outcomes)}; {len(node.foreign)} foreign instances untouched"
    )


@pytest.mark.parametrize("code", [RESOURCES, UNKNOWN])
def test_failed_creation_is_explained(code: int, site: Site) -> None:
    node = start_node(site, gpus=1)
    node.machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code, times=None)
    made = site.allocate("1g.18gb")
    seen = site.until_state(made["id"], "failed")
    assert seen["cause"] == "failed"
    assert CODES[code] in seen["detail"], seen["detail"]
    assert "given up after 8 attempts" in seen["detail"]
    assert f"1g.18gb on {node.name} GPU 0 at slice {made['start']}" in seen["detail"]
    site.until(lambda: not site.releasing(), "its instances are gone")
    site.settle()
    attempts = [e["entry"].get("attempts", 0) for e in site.events() if e["kind"] == "part-turned"]
    assert max(attempts) == 7, "each attempt is reported, and the last one ends the allocation"


def test_busy_instance_is_quarantined(site: Site) -> None:
    node = start_node(site, gpus=1)
    made = site.allocate("3g.71gb")
    seen = site.until_state(made["id"], "active")
    node.machine.set_busy(seen["gpu"], seen["start"], process=4321)
    site.release(made["id"])
    site.until(lambda: part(site, made["id"])["phase"] == "quarantined", "it is quarantined")
    told = part(site, made["id"])
    assert "in use" in told["detail"]
    detail = site.detail(node.name)
    assert detail["devices"][0]["quarantined"] == 1
    assert site.allocation(made["id"])["state"] == "releasing"
    status, said = site.server.ask("POST", "/v1/allocations", {"profile": "3g.71gb"})
    assert status == 409, said  # its slices stay occupied
    node.kill()  # a restart of the agent does not change that
    site.until(lambda: node.deaths == 1, "the agent is restarted")
    site.until(lambda: part(site, made["id"])["phase"] == "quarantined", "it is still quarantined")
    node.machine.set_idle(seen["gpu"], seen["start"])
    site.until_state(made["id"], "released")
    site.settle()
    assert node.own_instances() == []
    phases = [e["entry"]["phase"] for e in site.events() if e["kind"] == "part-turned"]
    assert len(phases) < 40, "repeated failures are not reported forever"


def test_removed_gpu(site: Site) -> None:
    node = start_node(site, gpus=2)
    made = [site.allocate("3g.71gb") for _ in range(2)]
    seen = [site.until_state(one["id"], "active") for one in made]
    assert {one["gpu"] for one in seen} == {0, 1}
    lost, kept = sorted(seen, key=lambda one: -one["gpu"])
    gone = {u for i in node.machine.instances(1) for c in i.computes for u in [c.uuid]}
    node.machine.remove(1)
    site.until(lambda: holds(site, node, 1), "the GPU is held")
    assert MESSAGE.search("; ".join(holds(site, node, 1).values()))
    assert holds(site, node, 0) == {}
    # Nothing is freed: allocations stay, and new requests do not get the GPU.
    assert site.allocation(lost["id"])["state"] == "active"
    status, _ = site.server.ask("POST", "/v1/allocations", {"profile": "4g.71gb"})
    assert status == 409
    site.release(lost["id"])
    site.until(lambda: part(site, lost["id"]).get("detail"), "the reason is reported")
    assert site.allocation(lost["id"])["state"] == "releasing"
    node.kill()  # a new process does not see the GPU at all
    site.until(lambda: node.deaths == 1, "the agent is restarted")
    site.until_ready(node)
    site.until(lambda: holds(site, node, 1), "the GPU is held")
    assert site.allocation(lost["id"])["state"] == "releasing"
    assert site.allocation(kept["id"])["state"] == "active"
    node.foreign -= gone  # its foreign instances are gone
    node.machine.restore(1)
    node.machine.set_mig(1, True)
    node.kill()  # a process sees only the GPUs that were present at its start
    site.until_state(lost["id"], "released")
    site.until(lambda: not holds(site, node, 1), "the GPU is back")
    site.settle()


def reboot(site: Site, node: Node) -> None:
    """Reboot the node; its agent enables MIG mode when it restarts."""
    node.kill()
    node.deaths -= 1
    node.foreign.clear()
    node.machine.reboot()
    node.arguments = [w for gpu in node.machine.gpus for w in ("--enable-mig", gpu.uuid)]


@pytest.mark.parametrize("policy", ["recreate", "fail"])
def test_reboot(policy: str, open_site: OpenSite) -> None:
    site = open_site(f"agents.after_reboot={policy}")
    node = start_node(site, gpus=2)
    made = [site.allocate(profile) for profile in ("3g.71gb", "1g.18gb", "2g.35gb")]
    uuids = {site.until_state(one["id"], "active")["uuid"] for one in made}
    leaving = site.until_state(site.allocate("1g.18gb")["id"], "active")
    node.machine.set_busy(leaving["gpu"], leaving["start"])
    site.release(leaving["id"])
    reboot(site, node)
    if policy == "recreate":
        seen = [site.until_state(one["id"], "active") for one in made]
        site.until(
            lambda: not uuids & {site.allocation(one["id"])["uuid"] for one in made},
            "all have new UUIDs",
        )
        places = [(one["gpu"], one["profile"], one["start"]) for one in made]
        assert [(one["gpu"], one["profile"], one["start"]) for one in seen] == places
    else:
        for one in made:
            seen_one = site.until_state(one["id"], "failed")
            assert seen_one["detail"] == f"node {node.name} was restarted"
    site.until_state(leaving["id"], "released")
    site.settle()
    assert len(node.own_instances()) == (3 if policy == "recreate" else 0)
    joined = [e["entry"] for e in site.events() if e["kind"] == "agent-joined"]
    assert any(entry.get("rebooted") for entry in joined)


@pytest.mark.parametrize(
    ("happens", "word"),
    [
        (lambda machine: machine.xid(0, 79), "XID 79"),
        (lambda machine: machine.lose(0), "lost"),
        (lambda machine: machine.add_ecc(0, uncorrected=2), "ECC"),
        (lambda machine: machine.set_mig(1, False) or machine.xid(0, 48), "XID 48"),
    ],
    ids=["xid", "lost", "ecc", "mig-off-elsewhere"],
)
def test_unhealthy_gpu_is_held_with_the_reason(
    happens: Callable[[Any], None], word: str, site: Site
) -> None:
    node = site.node(gpus=2)
    node.create_foreign(0, "1g.18gb", 6)
    node.start()
    site.until_ready(node)
    site.settle()
    made = site.until_state(site.allocate("2g.35gb")["id"], "active")
    node.machine.xid(0, 13)  # caused by a program, not by the GPU
    happens(node.machine)
    site.until(lambda: word in str(holds(site, node, 0)), "the GPU is held")
    assert site.allocation(made["id"])["state"] == "active"
    assert "XID 13" not in str(site.detail(node.name))
    if not node.machine.gpus[1].mig:
        site.until(lambda: "MIG mode is off" in str(holds(site, node, 1)), "the other GPU is held")
        status, _ = site.server.ask("POST", "/v1/allocations", {"profile": "1g.18gb"})
        assert status == 409
        return
    other = site.until_state(site.allocate("2g.35gb")["id"], "active")
    assert other["gpu"] == 1
    node.kill()  # the agent remembers it
    site.until(lambda: node.deaths == 1, "the agent is restarted")
    site.until(lambda: word in str(holds(site, node, 0)), "the GPU is held")
