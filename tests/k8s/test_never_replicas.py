"""Never two claims on the same slices: replicas that take over from one that sleeps, or lags."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from pathlib import Path

from tests.k8s.api import Api, until
from tests.k8s.checker import until_quiet
from tests.k8s.cluster import clear, make_classes, pods_in
from tests.k8s.conftest import Nodes
from tests.k8s.faults import Fault, Hold, Write
from tests.k8s.plane import Plane
from tests.k8s.replica import SEALED
from tests.k8s.scene import (
    MODEL,
    Living,
    condition,
    living,
    make_pod,
    make_templates,
    play,
    play_with,
    remove_pod,
    sample,
    until_run,
    witnessed,
)

LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/slicewise"


def holder(api: Api) -> str:
    """Who leads."""
    found = api.find(LEASE)
    return "" if found is None else str(found["spec"].get("holderIdentity") or "")


def paused_at(one: Living, step: int, api: Api, space: str, early: bool) -> Write | None:
    """Pause the leader at a write, which is on its way; let it arrive when another one leads.

    Either ``early``, when the other has just begun, or once it has served all.
    """
    hold = Hold()
    held: list[Write] = []

    def pause(write: Write) -> None:
        held.append(write)
        one.replica.signal(signal.SIGSTOP)
        hold(write)

    def let_go() -> None:
        hold.there.wait()
        if held and early:
            until("another one leads", lambda: holder(api) not in ("", one.name))
            hold.free.set()

    friend = threading.Thread(target=let_go, daemon=True)
    friend.start()
    try:
        one.proxy.begin({step: Fault(before=pause)})
        play(api, space, 0.01 * (step % 7))
    finally:
        one.proxy.begin()
        hold.there.set()
        hold.free.set()
        friend.join()
        if step % 2:
            time.sleep(0.1)  # the write arrives while its sender is still asleep
        if held:
            one.replica.signal(signal.SIGCONT)
    if held:
        until("the write has been answered", lambda: held[0].status)
    until_quiet(api)
    clear(api, space)
    return held[0] if held else None


def test_the_leader_paused_at_every_write(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=2)
    answers: Counter[int | None] = Counter()
    with (
        witnessed(plane),
        living(plane, tmp_path, name="a") as a,
        living(plane, tmp_path, name="b") as b,
    ):
        both = {"a": a, "b": b}
        leader = both[until("one leads", lambda: holder(plane.api))]
        steps = len(play_with(plane.api, space, leader, {}))
        for step in sample(range(2 * steps), 6):
            leader = both[until("one leads", lambda: holder(plane.api))]
            late = paused_at(leader, step // 2 + 1, plane.api, space, bool(step % 2))
            if late is not None:
                assert holder(plane.api) != leader.name
                answers[late.status] += 1
                if late.of_claim and not step % 2:
                    assert late.status in (404, 409), late
        print(f"{steps} writes, {sum(answers.values())} pauses, late answers {dict(answers)}")
        assert answers
        assert (a.lives, b.lives) == (1, 1)


def test_a_successor_that_sees_the_past(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """What the former leader gave away last has not reached the next one when it begins."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=2)
    api = plane.api
    make_templates(api, space)
    with witnessed(plane), living(plane, tmp_path, name="a") as a:
        until("a leads", lambda: holder(api) == "a")
        with living(plane, tmp_path, name="b") as b:
            make_pod(api, space, "first", "one")  # so that b is seen to follow
            until_run(api, space, "first")
            make_pod(api, space, "last", "whole", schedulingGates=[{"name": "test/wait"}])
            until("b follows", lambda: b.proxy.watching("resourceclaims"))
            time.sleep(1)
            with b.proxy.behind("resourceclaims"):
                remove_pod(api, space, "first")
                for name in ("x", "y"):
                    make_pod(api, space, name, "whole")
                until_run(api, space, "x", "y")
                api.patch(f"{pods_in(space)}/last", {"spec": {"schedulingGates": None}})
                a.close()
                until("b leads", lambda: holder(api) == "b")
                until("it knows that nothing is left", lambda: condition(api, space, "last"))
            remove_pod(api, space, "x")
            until_run(api, space, "last", "y")
