"""Never two claims on the same slices: replicas that replace a paused or delayed leader."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from pathlib import Path

from tests.kubernetes_e2e.api import Api, until
from tests.kubernetes_e2e.checker import until_quiet
from tests.kubernetes_e2e.cluster import clear, make_classes, pods_in
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.faults import Fault, Hold, Write
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import SEALED
from tests.kubernetes_e2e.scene import (
    MODEL,
    Living,
    condition,
    holder,
    living,
    make_pod,
    make_templates,
    make_urgent,
    play,
    play_with,
    remove_pod,
    sample,
    until_run,
    witnessed,
)


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
        if held:
            until("another one leads", lambda: holder(api) != one.name)
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
        until("one leads", lambda: a.has_led or b.has_led)
        leader = until("one leads", lambda: both.get(holder(plane.api)))
        steps = len(play_with(plane.api, space, leader, {}))
        for step in sample(range(2 * steps), 6):
            leader = until("one leads", lambda: both.get(holder(plane.api)))
            late = paused_at(leader, step // 2 + 1, plane.api, space, bool(step % 2))
            if late is not None:
                answers[late.status] += 1
                if late.of_claim and not step % 2:
                    assert late.status in (404, 409), late
        print(f"{steps} writes, {sum(answers.values())} pauses, late answers {dict(answers)}")
        assert answers
        assert (a.lives, b.lives) == (1, 1)


def test_a_successor_with_delayed_watches(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """The new leader starts before it has seen the last allocation of the former one."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=2)
    api = plane.api
    make_templates(api, space)
    with witnessed(plane), living(plane, tmp_path, name="a") as a:
        until("a leads", lambda: a.has_led)
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


def test_a_late_write_of_a_former_leader_for_a_device_of_another_pod(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """Its claim is unchanged since, except that the new leader has removed the finalizer."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)
    make_urgent(api)
    hold = Hold()
    held: list[Write] = []

    with (
        witnessed(plane),
        living(plane, tmp_path, name="a") as a,
        living(plane, tmp_path, name="b") as b,
    ):
        both = {"a": a, "b": b}
        until("one leads", lambda: a.has_led or b.has_led)
        leader = until("one leads", lambda: both.get(holder(api)))

        def pause(write: Write) -> Fault | None:
            def stop(write: Write) -> None:
                held.append(write)
                leader.replica.signal(signal.SIGSTOP)
                hold(write)

            of_status = write.of_claim and write.path.endswith("/status")
            return Fault(before=stop) if of_status and not held else None

        leader.proxy.choose = pause
        make_pod(api, space, "first", "whole")
        until("the leader is paused", hold.there.is_set)
        make_pod(api, space, "second", "whole", priorityClassName="urgent")
        until_run(api, space, "second")
        hold.free.set()
        until("the late write is answered", lambda: held[0].status)
        leader.replica.signal(signal.SIGCONT)
        assert held[0].status == 409
        remove_pod(api, space, "second")
        until_run(api, space, "first")
