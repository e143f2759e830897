"""Never two claims on the same slices: the controller killed, or faults, at each of its writes."""

from __future__ import annotations

from pathlib import Path

from tests.kubernetes_e2e.api import until
from tests.kubernetes_e2e.cluster import claims_of, make_classes
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.faults import Fault, Write
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import SEALED
from tests.kubernetes_e2e.scene import (
    MODEL,
    living,
    make_pod,
    make_templates,
    make_urgent,
    play_with,
    remove_pod,
    running,
    sample,
    until_run,
    witnessed,
)


def test_killed_at_every_write(plane: Plane, nodes: Nodes, space: str, tmp_path: Path) -> None:
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=2)
    with witnessed(plane), living(plane, tmp_path) as one:
        steps = len(play_with(plane.api, space, one, {}))
        before = Fault(before=one.kill, forward=False)
        after = Fault(after=one.kill, cut=True)
        # Twice as many as there are writes: each with the kill before it, and behind it.
        for step in sample(range(2 * steps), 4):
            fault = after if step % 2 else before
            play_with(plane.api, space, one, {step // 2 + 1: fault}, pause=0.01 * (step % 7))
        print(f"{steps} writes, {one.proxy.met} kills, {one.lives} lives")
        assert one.proxy.met
        assert one.lives == one.proxy.met + 1


def test_misled_at_every_write(plane: Plane, nodes: Nodes, space: str, tmp_path: Path) -> None:
    """The answer is lost or wrong, or the write takes effect late."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=2)
    faults = [Fault(answer=status) for status in (500, 409, 429)]
    faults += [Fault(cut=True), Fault(late=0.3), Fault(late=1.5)]
    with witnessed(plane), living(plane, tmp_path) as one:
        steps = len(play_with(plane.api, space, one, {}))
        for step in sample(range(len(faults) * steps), 4):
            fault = faults[step % len(faults)]
            play_with(
                plane.api, space, one, {step // len(faults) + 1: fault}, pause=0.01 * (step % 7)
            )
        for fault in sample(faults, 2):  # and many at once
            play_with(plane.api, space, one, dict.fromkeys(range(1, 2 * steps, 3), fault))
        print(f"{steps} writes, {one.proxy.met} faults")
        assert one.proxy.met
        assert one.lives == 1


def test_a_late_write_for_a_device_of_another_claim(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """It seemed lost; meanwhile a pod of higher priority arrived."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=1)
    api = plane.api
    make_templates(api, space)
    make_urgent(api)
    late: list[Write] = []

    def lose(write: Write) -> Fault | None:
        def meanwhile(write: Write) -> None:
            late.append(write)
            make_pod(api, space, "second", "whole", priorityClassName="urgent")
            until("the second has a claim", lambda: claims_of(api, space, "second"))

        of_status = write.of_claim and write.path.endswith("/status")
        return Fault(before=meanwhile, late=3.0) if of_status and not late else None

    with witnessed(plane), living(plane, tmp_path) as one:
        one.proxy.choose = lose
        make_pod(api, space, "first", "whole")
        until("a pod runs", lambda: running(api, space))
        until("the late write is answered", lambda: late[0].status)
        assert late[0].status == 409
        [there] = running(api, space)
        remove_pod(api, space, there)
        until_run(api, space, *({"first", "second"} - {there}))
        assert one.lives == 1
