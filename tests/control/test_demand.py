"""The estimate of the demand as part of the state: what counts, and that it is replayed exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.control.control_plane import A30, ControlPlane

from slicewise.control.commands import Create, Terms
from slicewise.control.snapshot import (
    decode_snapshot,
    encode_snapshot,
    restore_snapshot,
    snapshot_of,
)
from slicewise.core.request import Need, Request
from slicewise.engine.demand import DemandEstimate
from slicewise.journal.entries import Want


def _plane(gpus: int = 2, **quota: Any) -> ControlPlane:
    plane = ControlPlane()
    plane.node(gpus=gpus)
    plane.tenant(**quota)
    return plane


def _asked(plane: ControlPlane) -> dict[str, float]:
    """What was asked for: its share, by the text of the request."""
    return {str(request): share for request, share in plane.state.demand.estimate.shares.items()}


def test_placed_queued_and_rejected_requests_count_once() -> None:
    plane = _plane(gpus=1)
    assert plane.create("7g.80gb")[0] == 201
    assert plane.create("3g.40gb")[0] == 409
    status, queued = plane.create("2g.20gb", wait=60)
    assert status == 202
    plane.release(next(iter(plane.state.allocations)))
    assert plane.state.allocations[queued["id"]].parts
    assert plane.state.demand.estimate.requests == 3
    assert set(_asked(plane)) == {"7g.80gb", "3g.40gb", "2g.20gb"}


def test_what_a_quota_rejects_is_no_demand() -> None:
    plane = _plane(memory_slices=4)
    assert plane.create("3g.40gb")[0] == 201
    assert plane.create("3g.40gb")[0] == 409
    assert plane.create("7g.80gb")[0] == 409
    assert plane.state.demand.estimate.requests == 1


def test_a_profile_of_the_catalog_that_no_node_has_is_no_demand() -> None:
    plane = _plane()
    assert plane.create("1g.6gb")[0] == 409
    assert plane.state.demand.estimate.requests == 0
    plane.node("n1", geometry=A30)
    assert plane.create("1g.6gb")[0] == 201
    assert set(_asked(plane)) == {"1g.6gb"}


def test_needs_and_model_lists_do_not_multiply_the_kinds_of_request() -> None:
    plane = _plane(gpus=8)
    plane.node("n1", geometry=A30)
    for step in range(200):
        need = Want(compute=1, memory_gb=6.5 + step / 100)
        models = [("A100-80GB",), ("A100-80GB", f"made-up-{step}"), ("x",) * step + ("A100-80GB",)]
        plane.ask(Create("acme", Terms(need)))
        for named in models:
            plane.ask(Create("acme", Terms(Want(profile="1g.10gb", models=named))))
    estimate = plane.state.demand.estimate
    assert set(estimate.asked_for) == {Request(Need(1, 10.0)), Request("1g.10gb")}


def test_a_request_on_one_of_two_models_is_told_apart() -> None:
    plane = _plane()
    plane.node("n1", geometry=A30)
    need = Want(compute=1, memory_gb=6, models=("A30-24GB",))
    plane.ask(Create("acme", Terms(need)))
    assert set(plane.state.demand.estimate.asked_for) == {Request(Need(1, 6.0), ("A30-24GB",))}


def test_lifetimes_count_with_what_was_stated() -> None:
    plane = _plane()
    terms: list[dict[str, Any]] = [
        {},
        {"lease": 50},
        {"expected_seconds": 5},
        {"lease": 50, "expected_seconds": 7},
    ]
    placed = [plane.create("1g.10gb", **each)[1]["id"] for each in terms]
    plane.wait(10)
    for identity in placed:
        plane.release(identity)
    assert plane.state.demand.estimate.stays == (
        ("1g.10gb", 10, None),
        ("1g.10gb", 10, 50),
        ("1g.10gb", 10, 5),
        ("1g.10gb", 10, 7),
    )


def test_lifetimes_that_were_cut_short_do_not_count() -> None:
    plane = _plane(gpus=1)
    plane.create("7g.80gb")
    plane.create("7g.80gb", wait=5)
    plane.wait(10)
    assert plane.state.demand.estimate.stays == ()


def test_a_huge_request_counts_as_far_as_the_tenants_part_goes() -> None:
    plane = _plane(gpus=4)
    plane.tenant("beta")
    for _ in range(10):
        plane.create("1g.10gb", tenant="beta")
    plane.create("7g.80gb", count=100_000)
    assert plane.state.demand.estimate.requests <= 30
    assert all(math.isfinite(share) for share in _asked(plane).values())


def test_a_tenant_that_repeats_a_rejected_request_does_not_become_the_demand() -> None:
    plane = _plane(gpus=4)
    plane.tenant("beta")
    for step in range(3000):
        if step % 20 == 0:
            plane.create("2g.20gb", tenant="beta", lease=300)
        plane.create("7g.80gb", count=100)
        plane.wait(1)
    assert _asked(plane)["2g.20gb"] > 0.4


def test_a_tenant_that_creates_and_releases_in_a_loop_does_not_set_the_lifetimes() -> None:
    plane = _plane(gpus=4)
    plane.tenant("beta")
    for step in range(3000):
        if step % 20 == 0:
            plane.create("2g.20gb", tenant="beta", lease=300)
        _, body = plane.create("1g.10gb")
        plane.release(body["id"])
        plane.wait(1)
    assert plane.state.demand.estimate.mean_lifetime > 60  # 14 if all counted


@pytest.mark.parametrize("at", [3, 40, 150])
def test_a_snapshot_continues_the_estimate_exactly(at: int) -> None:
    plane = _plane(gpus=4)
    plane.tenant("beta")
    restored = None
    for step in range(200):
        plane.create(
            ["1g.10gb", "2g.20gb", "7g.80gb"][step % 3],
            ["acme", "beta"][step % 2],
            lease=7 + step / 3,
        )
        plane.wait(0.7)
        if step == at:
            data = encode_snapshot(snapshot_of(plane.state))
            restored = restore_snapshot(decode_snapshot(data), plane.fresh())
            assert encode_snapshot(snapshot_of(restored)) == data
    assert restored is not None
    for row in plane.rows:
        if row.seq > restored.seq:
            restored.apply(row)
    assert restored.demand.snapshot() == plane.state.demand.snapshot()
    assert isinstance(restored.demand.estimate, DemandEstimate)
