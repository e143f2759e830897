"""Never two claims on the same slices: claims of the stock class on the same GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.kubernetes_e2e.api import Api, until
from tests.kubernetes_e2e.checker import Witness
from tests.kubernetes_e2e.cluster import (
    allocated,
    claims_of,
    clear,
    clear_allocation,
    make_classes,
    results,
    unscheduled_because,
    write_allocation,
)
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.faults import Fault, Hold, Proxy, Write
from tests.kubernetes_e2e.nvidia import MIG_CLASS
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import SEALED
from tests.kubernetes_e2e.scene import (
    MODEL,
    ROUNDS,
    Load,
    living,
    make_pod,
    make_templates,
    remove_pod,
    running,
    settled,
    until_run,
    witnessed,
)


@contextmanager
def slow_scheduler(plane: Plane, folder: Path) -> Iterator[Proxy]:
    """The scheduler behind a proxy, meanwhile."""
    proxy = Proxy(plane, folder, "scheduler")
    plane.stop("scheduler")
    plane._flags["scheduler"] = [f"--kubeconfig={proxy.kubeconfig}"]
    try:
        plane.start("scheduler")
        yield proxy
    finally:
        plane.stop("scheduler")
        plane._flags["scheduler"] = []
        plane.start("scheduler")
        proxy.close()


def held(hold: Hold, prefix: str) -> Callable[[Write], Fault | None]:
    """Holds back the allocation of a claim whose name begins so, once."""

    def choose(write: Write) -> Fault | None:
        path = write.path.split("?")[0]
        wanted = f"/resourceclaims/{prefix}" in path and path.endswith("/status")
        return Fault(before=hold) if wanted and not hold.there.is_set() else None

    return choose


@pytest.fixture
def api(plane: Plane, nodes: Nodes, space: str) -> Api:
    """A node with one GPU, and templates of both kinds."""
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=1)
    make_templates(plane.api, space)
    make_templates(plane.api, space, MIG_CLASS)
    return plane.api


def one_after_the_other(api: Api, space: str) -> None:
    """Both want the whole GPU: one runs, then the other."""
    until("one runs", lambda: running(api, space))
    [first] = running(api, space)
    remove_pod(api, space, first)
    until_run(api, space, *({"stock", "ours"} - {first}))


def test_the_scheduler_frees_a_device_of_two_claims_when_one_ends(
    plane: Plane, api: Api, space: str
) -> None:
    """Why that must not be, not even for a moment: the scheduler then gives it to a third."""
    with Witness(plane) as witness:
        make_pod(api, space, "stock", "stock-whole")
        until_run(api, space, "stock")
        [(node, device)] = allocated(api, space, "stock")
        make_pod(api, space, "third", "stock-whole")
        until("the third is tried", lambda: unscheduled_because(api, space, "third"))
        make_pod(api, space, "ours", "whole", schedulerName="unknown")
        [ours] = until("ours has a claim", lambda: claims_of(api, space, "ours"))
        write_allocation(api, space, ours, node, results(node, [device]))
        clear_allocation(api, space, ours)
        until_run(api, space, "stock", "third")
        assert witness.verdict().overlaps  # it does see such things
    assert allocated(api, space, "stock") == allocated(api, space, "third")


def test_claims_of_both_kinds_under_load(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    make_classes(plane.api, [SEALED])
    nodes(1, MODEL, gpus=2)
    api = plane.api
    make_templates(api, space)
    make_templates(api, space, MIG_CLASS)
    kinds = ["one", "two", "three"]
    with witnessed(plane), living(plane, tmp_path) as one:
        ours = Load(api, space, kinds, most=5, seed=1, prefix="ours-")
        stock = Load(api, space, [f"stock-{kind}" for kind in kinds], most=5, prefix="stock-")
        for load in (ours, stock):
            load.start()
        enough = 3 + 100 * ROUNDS
        until("both kinds run", lambda: min(ours.ran, stock.ran) >= enough)
        for load in (ours, stock):
            load.end()
        clear(api, space)
        print(f"ours {ours.made} made, {ours.ran} ran; stock {stock.made} made, {stock.ran} ran")
        assert one.lives == 1


def test_delayed_writes_of_the_scheduler(
    plane: Plane, api: Api, space: str, tmp_path: Path
) -> None:
    hold = Hold()
    with witnessed(plane) as witness, living(plane, tmp_path), slow_scheduler(plane, tmp_path) as p:
        p.choose = held(hold, "stock-")
        make_pod(api, space, "stock", "stock-whole")
        until("the scheduler has decided", hold.there.is_set)
        make_pod(api, space, "ours", "whole")
        until("ours has the same", lambda: allocated(api, space, "ours"))
        hold.free.set()
        until_run(api, space, "stock")
        until("ours gives way", lambda: not allocated(api, space, "ours"))
        remove_pod(api, space, "stock")
        until_run(api, space, "ours")
        assert settled(api, witness).moments


def test_slices_given_up_are_not_allocated_to_a_third_claim(
    plane: Plane, api: Api, space: str, tmp_path: Path
) -> None:
    hold = Hold()
    with witnessed(plane), living(plane, tmp_path) as one, slow_scheduler(plane, tmp_path) as p:
        until("it leads", lambda: one.has_led)
        p.choose = held(hold, "stock-")
        make_pod(api, space, "stock", "stock-whole")
        until("the scheduler has decided", hold.there.is_set)
        make_pod(api, space, "ours", "whole")
        time.sleep(2)  # ours may have been given the same by now
        hold.free.set()
        until_run(api, space, "stock")
        until("ours gives way", lambda: not allocated(api, space, "ours"))
        make_pod(api, space, "third", "stock-whole")
        until(
            "the third was tried",
            lambda: unscheduled_because(api, space, "third") or "third" in running(api, space),
        )


def test_the_first_stock_claim_ever(plane: Plane, api: Api, space: str, tmp_path: Path) -> None:
    """Ours is on its way when the first stock claim comes and is decided on."""
    hold, hold_ours = Hold(), Hold()
    with (
        witnessed(plane),
        living(plane, tmp_path, "--hold-back", "always") as one,
        slow_scheduler(plane, tmp_path) as scheduler,
    ):
        scheduler.choose = held(hold, "stock-")
        one.proxy.choose = held(hold_ours, "")
        make_pod(api, space, "ours", "whole")
        until("ours is on its way", hold_ours.there.is_set)
        make_pod(api, space, "stock", "stock-whole")
        until("the scheduler has decided", hold.there.is_set)
        hold_ours.free.set()
        time.sleep(1)
        hold.free.set()
        one_after_the_other(api, space)


def test_a_scheduler_slower_than_the_settling_time(
    plane: Plane, api: Api, space: str, tmp_path: Path
) -> None:
    hold = Hold()
    with (
        witnessed(plane),
        living(plane, tmp_path, "--settle-seconds", "1"),
        slow_scheduler(plane, tmp_path) as p,
    ):
        p.choose = held(hold, "stock-")
        make_pod(api, space, "stock", "stock-whole")
        until("the scheduler has decided", hold.there.is_set)
        make_pod(api, space, "ours", "whole")
        time.sleep(3)  # three times as long as it is given
        hold.free.set()
        one_after_the_other(api, space)
