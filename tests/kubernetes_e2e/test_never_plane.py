"""Never two claims on the same slices: the API server restarted, watches cut, under load."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tests.kubernetes_e2e.api import until
from tests.kubernetes_e2e.cluster import claims_in, clear, make_classes
from tests.kubernetes_e2e.conftest import Nodes
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import SEALED
from tests.kubernetes_e2e.scene import (
    MODEL,
    ROUNDS,
    Load,
    living,
    make_claim,
    make_pod,
    make_templates,
    remove_pod,
    until_run,
    witnessed,
)

KINDS = ["one", "one", "two", "three", "pair", "whole"]


def test_the_api_server_restarted_under_load(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    make_classes(plane.api, [SEALED])
    nodes(2, MODEL, gpus=2)
    make_templates(plane.api, space)
    with witnessed(plane) as witness, living(plane, tmp_path) as one:
        load = Load(plane.api, space, KINDS, most=12)
        load.start()
        for _ in range(2 + 5 * ROUNDS):
            ran = load.ran
            until("pods run", lambda ran=ran: load.ran > ran + 5)  # type: ignore[misc]
            plane.kill("apiserver")  # asked to end, it waits a minute for its watchers
            plane.start("apiserver")
        ran = load.ran
        until("pods run again", lambda: load.ran > ran + 5)
        load.end()
        clear(plane.api, space)
        print(f"{load.made} pods, {load.ran} seen running", witness.verdict())
        assert one.lives == 1


def test_watches_cut_under_load(plane: Plane, nodes: Nodes, space: str, tmp_path: Path) -> None:
    """Also claims of the same name, again and again: their past must not come back."""
    make_classes(plane.api, [SEALED])
    nodes(2, MODEL, gpus=2)
    make_templates(plane.api, space)
    chance = random.Random(1)
    with witnessed(plane), living(plane, tmp_path) as one:
        load = Load(plane.api, space, KINDS, most=10)
        load.start()
        for number in range(6 + 60 * ROUNDS):
            claim = make_claim(plane.api, space, "again", chance.choice(["1g.10gb", "3g.40gb"]))
            made = claim["metadata"]["uid"]
            make_pod(plane.api, space, f"user-{number}", shared=["again"])
            one.proxy.cut_watches(chance.choice(["", "resourceclaims", "pods"]))
            until_run(plane.api, space, f"user-{number}")
            one.proxy.cut_watches(chance.choice(["", "resourceclaims", "resourceslices"]))
            remove_pod(plane.api, space, f"user-{number}")
            plane.api.delete(f"{claims_in(space)}/again")

            def gone(made: str = made) -> bool:
                found = plane.api.find(f"{claims_in(space)}/again")
                return found is None or found["metadata"]["uid"] != made

            until("the claim is gone", gone)
            time.sleep(chance.random() * 0.1)
        load.end()
        clear(plane.api, space)
        print(f"{one.proxy.cuts} watches cut, {load.made} pods, {load.ran} seen running")
        assert one.proxy.cuts > 10
        assert one.lives == 1


def test_an_outage_of_the_connection(
    plane: Plane, nodes: Nodes, space: str, tmp_path: Path
) -> None:
    """Nothing gets through for longer than a lease lasts; what was under way arrives later."""
    make_classes(plane.api, [SEALED])
    nodes(2, MODEL, gpus=2)
    make_templates(plane.api, space)
    with witnessed(plane), living(plane, tmp_path) as one:
        load = Load(plane.api, space, KINDS, most=12, seed=2)
        load.start()
        for _ in range(2 + 5 * ROUNDS):
            ran = load.ran
            until("pods run", lambda ran=ran: load.ran > ran + 5)  # type: ignore[misc]
            one.proxy.open.clear()
            time.sleep(2.0)
            one.proxy.open.set()
        ran = load.ran
        until("pods run again", lambda: load.ran > ran + 5)
        load.end()
        clear(plane.api, space)
        print(f"{load.made} pods, {load.ran} seen running")
        assert one.lives == 1
