"""Never two claims on the same slices: the controller killed, or misled, at each of its writes."""

from __future__ import annotations

from pathlib import Path

from tests.k8s.cluster import make_classes
from tests.k8s.conftest import Nodes
from tests.k8s.faults import Fault
from tests.k8s.plane import Plane
from tests.k8s.replica import SEALED
from tests.k8s.scene import MODEL, living, play_with, sample, witnessed


def test_killed_at_every_write(plane: Plane, nodes: Nodes, space: str, tmp_path: Path) -> None:
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=2)
    with witnessed(plane), living(plane, tmp_path) as one:
        steps = len(play_with(plane.api, space, one, {}))
        before = Fault(before=one.kill, forward=False)
        after = Fault(after=one.kill, cut=True)
        # Twice as many as there are writes: each with the kill before it, and behind it.
        for step in sample(range(2 * steps), 6):
            fault = after if step % 2 else before
            play_with(plane.api, space, one, {step // 2 + 1: fault}, pause=0.01 * (step % 7))
        print(f"{steps} writes, {one.proxy.met} kills, {one.lives} lives")
        assert one.proxy.met
        assert one.lives == one.proxy.met + 1


def test_misled_at_every_write(plane: Plane, nodes: Nodes, space: str, tmp_path: Path) -> None:
    """The answer is lost, or says what is not so; or the write comes later than it seemed."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=2)
    faults = [Fault(answer=status) for status in (500, 409, 429)]
    faults += [Fault(cut=True), Fault(late=0.3), Fault(late=1.5)]
    with witnessed(plane), living(plane, tmp_path) as one:
        steps = len(play_with(plane.api, space, one, {}))
        for step in sample(range(len(faults) * steps), 8):
            fault = faults[step % len(faults)]
            play_with(
                plane.api, space, one, {step // len(faults) + 1: fault}, pause=0.01 * (step % 7)
            )
        for fault in faults:  # and many at once
            play_with(plane.api, space, one, dict.fromkeys(range(1, 2 * steps, 3), fault))
        print(f"{steps} writes, {one.proxy.met} faults")
        assert one.proxy.met
        assert one.lives == 1
