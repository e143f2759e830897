"""Reservations with a condition on the GPU: a window is of no use where a request cannot run."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engine.cluster_in_use import ClusterInUse

from slicewise.catalog import load_geometry
from slicewise.core.cluster import Cluster, Instance
from slicewise.core.request import Request
from slicewise.engine.reservations import LineKey, Reservations, Window

A100 = load_geometry("A100-80GB")
WHOLE = Request("7g.80gb")
LINE = LineKey("ana", WHOLE, 1)


def test_a_window_is_found_only_where_the_request_suits() -> None:
    cluster = Cluster.of(A100, 3)
    blockers = [cluster.place(gpu, "1g.10gb", 0) for gpu in range(3)]
    asked: list[tuple[int, tuple[Instance, ...]]] = []

    def suits(request: Request, gpu: int, ended: Sequence[Instance]) -> bool:
        assert request == WHOLE
        asked.append((gpu, tuple(ended)))
        return gpu in allowed

    reservations = Reservations(cluster, suits)
    allowed: set[int] = set()
    assert reservations.find(WHOLE, 1, {A100: 3}, lambda one: None, 0.0) is None
    assert sorted(asked) == [(gpu, (blockers[gpu],)) for gpu in range(3)]
    allowed.add(2)
    found = reservations.find(WHOLE, 1, {A100: 3}, lambda one: None, 0.0)
    assert found is not None
    assert [window.gpu for window in found] == [2]
    reservations.set(LINE, found)
    assert reservations.usable(LINE) == found
    allowed.clear()
    assert reservations.usable(LINE) == ()


def test_reservations_end_before_their_gpus_leave() -> None:
    cluster = ClusterInUse([(A100, 1), (A100, 1)])
    kept = cluster.ask("bob", "7g.80gb")
    gone = cluster.ask("bob", "7g.80gb")
    cluster.ask("ana", "7g.80gb")
    assert cluster.dispatcher.refusal(WHOLE) is not None
    assert cluster.dispatcher.refusal(Request("1g.10gb")) is None
    assert cluster.queue.line_count == 1
    cluster.reserve(LINE, (Window(1, A100.placements.index(_whole()), None),))
    (instance,) = cluster.running.pop(gone).instances
    cluster.scheduler.release(instance)
    cluster.dispatcher.freed(instance.gpu)
    cluster.dispatcher.removed(range(1, 2))
    cluster.cluster.remove_node("node-1")
    assert len(cluster.reservations) == 0
    cluster.settle()
    assert list(cluster.running) == [kept]


def _whole() -> object:
    return A100.placement("7g.80gb", 0)
