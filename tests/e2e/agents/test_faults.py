"""A driver that fails at every call, with many codes, once and for ever; and sick hardware.

Whatever fails, in the end the hardware is what is wanted, or a sentence says why it is not.
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
from tests.e2e.agents.test_killed import CHANGES, furnished, life
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
SENTENCE = re.compile(r"[a-z].{15,}")


def part(site: Site, identity: str) -> dict[str, Any]:
    """The one instance of an allocation."""
    (found,) = site.allocation(identity)["instances"]
    return dict(found)


def holds(site: Site, node: Node, gpu: int) -> dict[str, str]:
    """Why a GPU takes nothing new."""
    found: dict[str, str] = site.detail(node.name)["devices"][gpu]["holds"]
    return found


def attempt(site: Site, node: Node) -> str:
    """A life under faults that may last for ever: what came of it, with every failure explained.

    A call that failed for ever is then healed, and everything must come to its end.
    """
    before = site.detail(node.name)
    status, said = site.server.ask("POST", "/v1/allocations", {"profile": "2g.35gb"})
    if status != 201:  # the GPU was found sick before, or its agent has only just begun
        assert status == 409, said
        anew = before["agent"]["session"] != site.detail(node.name)["agent"]["session"]
        sick = any(holds(site, node, gpu.index) for gpu in node.machine.gpus)
        assert sick or anew or "unreported" in before["holds"], site.told()
        node.machine.heal()
        site.until(lambda: not any(holds(site, node, g.index) for g in node.machine.gpus), "healed")
        return "held"
    identity = said["id"]
    seen = site.until_state(identity, "active", "failed")
    if seen["state"] == "failed":
        assert SENTENCE.search(seen["detail"]), seen
        assert "could not be made" in seen["detail"]
        outcome = "failed with a reason"
    else:
        site.release(identity)
        outcome = "came and went"

        def over() -> bool:
            one = site.allocation(identity)
            if one["state"] == "released":
                return True
            return bool(one["instances"][0]["phase"] == "quarantined")

        site.until(over, "it is gone, or in quarantine")
        if part(site, identity)["phase"] == "quarantined":
            assert SENTENCE.search(part(site, identity)["detail"])
            outcome = "quarantined with a reason, then released"
    node.machine.heal()
    site.until(lambda: not site.leaving(), "nothing is leaving any more")
    site.until(lambda: not any(holds(site, node, g.index) for g in node.machine.gpus), "healed")
    site.settle()
    return outcome


def test_every_call_fails_with_many_codes(
    open_site: OpenSite, seed: int, rounds: int, tell: Tell
) -> None:
    rng = random.Random(seed)
    site = open_site()
    node = furnished(site, gpus=1)
    node.machine.forget_calls()
    life(site)
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
    struck = 0
    for name, code, times, done in points:
        fault = node.machine.fail(name, code, times=times, done=done)
        outcomes[attempt(site, node)] += 1
        struck += node.machine.struck(fault) > 0
        site.settle()
        assert node.own() == [], f"{name} {code} {times} {done}"
    assert node.foreign_left() == node.foreign
    assert outcomes["came and went"] > 0
    tell(
        f"{len(points)} faults ({len(called)} functions, {len(CODES)} codes, once and for ever), "
        f"{struck} struck: {dict(outcomes)}; {len(node.foreign)} foreign instances untouched"
    )


@pytest.mark.parametrize("code", [RESOURCES, UNKNOWN])
def test_a_creation_that_never_succeeds_is_explained(code: int, site: Site) -> None:
    node = furnished(site, gpus=1)
    node.machine.fail("nvmlDeviceCreateGpuInstanceWithPlacement", code, times=None)
    made = site.allocate("1g.18gb")
    seen = site.until_state(made["id"], "failed")
    assert seen["cause"] == "failed"
    assert CODES[code] in seen["detail"], seen["detail"]
    assert "given up after 8 attempts" in seen["detail"]
    assert f"1g.18gb on {node.name} GPU 0 at slice {made['start']}" in seen["detail"]
    site.until(lambda: not site.leaving(), "its parts are gone")
    site.settle()
    attempts = [e["entry"].get("attempts", 0) for e in site.events() if e["kind"] == "part-turned"]
    assert max(attempts) == 7, "each attempt is told, and the last ends it"


def test_busy_is_a_normal_state_and_then_quarantine(site: Site) -> None:
    node = furnished(site, gpus=1)
    made = site.allocate("3g.71gb")
    seen = site.until_state(made["id"], "active")
    node.machine.busy(seen["gpu"], seen["start"], process=4321)
    site.release(made["id"])
    site.until(lambda: part(site, made["id"])["phase"] == "quarantined", "it is quarantined")
    told = part(site, made["id"])
    assert "in use" in told["detail"]
    detail = site.detail(node.name)
    assert detail["devices"][0]["quarantined"] == 1
    assert site.allocation(made["id"])["state"] == "releasing"
    status, said = site.server.ask("POST", "/v1/allocations", {"profile": "3g.71gb"})
    assert status == 409, said  # the slices are not free
    node.kill()  # and it stays so, whoever looks after it
    site.until(lambda: node.deaths == 1, "the agent is started again")
    site.until(lambda: part(site, made["id"])["phase"] == "quarantined", "it is still")
    node.machine.idle(seen["gpu"], seen["start"])
    site.until_state(made["id"], "released")
    site.settle()
    assert node.own() == []
    phases = [e["entry"]["phase"] for e in site.events() if e["kind"] == "part-turned"]
    assert len(phases) < 40, "it is not told for ever"


def test_a_gpu_that_is_taken_out(site: Site) -> None:
    node = furnished(site, gpus=2)
    made = [site.allocate("3g.71gb") for _ in range(2)]
    seen = [site.until_state(one["id"], "active") for one in made]
    assert {one["gpu"] for one in seen} == {0, 1}
    lost, kept = sorted(seen, key=lambda one: -one["gpu"])
    gone = {u for i in node.machine.instances(1) for c in i.computes for u in [c.uuid]}
    node.machine.remove(1)
    site.until(lambda: holds(site, node, 1), "the GPU is held")
    assert SENTENCE.search("; ".join(holds(site, node, 1).values()))
    assert holds(site, node, 0) == {}
    # Nothing is freed: who holds it still does, and who asks goes elsewhere or nowhere.
    assert site.allocation(lost["id"])["state"] == "active"
    status, _ = site.server.ask("POST", "/v1/allocations", {"profile": "4g.71gb"})
    assert status == 409
    site.release(lost["id"])
    site.until(lambda: part(site, lost["id"]).get("detail"), "why it does not go is told")
    assert site.allocation(lost["id"])["state"] == "releasing"
    node.kill()  # one that starts without the GPU does not even see it
    site.until(lambda: node.deaths == 1, "the agent is started again")
    site.until_ready(node)
    site.until(lambda: holds(site, node, 1), "the GPU is held")
    assert site.allocation(lost["id"])["state"] == "releasing"
    assert site.allocation(kept["id"])["state"] == "active"
    node.foreign -= gone  # what was on it went with it
    node.machine.restore(1)
    node.machine.set_mig(1, True)
    node.kill()  # a process of NVML knows the GPUs there were when it began
    site.until_state(lost["id"], "released")
    site.until(lambda: not holds(site, node, 1), "the GPU is back")
    site.settle()


def rebooted(site: Site, node: Node) -> None:
    """The node is restarted, with its agent, which then switches MIG mode on again."""
    node.kill()
    node.deaths -= 1
    node.foreign.clear()
    node.machine.reboot()
    node.words = [w for gpu in node.machine.gpus for w in ("--enable-mig", gpu.uuid)]


@pytest.mark.parametrize("policy", ["recreate", "fail"])
def test_after_a_reboot(policy: str, open_site: OpenSite) -> None:
    site = open_site(f"agents.after_reboot={policy}")
    node = furnished(site, gpus=2)
    made = [site.allocate(profile) for profile in ("3g.71gb", "1g.18gb", "2g.35gb")]
    uuids = {site.until_state(one["id"], "active")["uuid"] for one in made}
    leaving = site.until_state(site.allocate("1g.18gb")["id"], "active")
    node.machine.busy(leaving["gpu"], leaving["start"])
    site.release(leaving["id"])
    rebooted(site, node)
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
    assert len(node.own()) == (3 if policy == "recreate" else 0)
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
def test_a_sick_gpu_is_held_with_the_reason(
    happens: Callable[[Any], None], word: str, site: Site
) -> None:
    node = site.node(gpus=2)
    node.put_foreign(0, "1g.18gb", 6)
    node.start()
    site.until_ready(node)
    site.settle()
    made = site.until_state(site.allocate("2g.35gb")["id"], "active")
    node.machine.xid(0, 13)  # a program's own fault, which is none of the GPU's
    happens(node.machine)
    site.until(lambda: word in str(holds(site, node, 0)), "the GPU is held")
    assert site.allocation(made["id"])["state"] == "active"
    assert "XID 13" not in str(site.detail(node.name))
    if not node.machine.gpus[1].mig:
        site.until(lambda: "MIG mode is off" in str(holds(site, node, 1)), "and the other one")
        status, _ = site.server.ask("POST", "/v1/allocations", {"profile": "1g.18gb"})
        assert status == 409
        return
    other = site.until_state(site.allocate("2g.35gb")["id"], "active")
    assert other["gpu"] == 1
    node.kill()  # it is remembered
    site.until(lambda: node.deaths == 1, "the agent is started again")
    site.until(lambda: word in str(holds(site, node, 0)), "the GPU is held")
