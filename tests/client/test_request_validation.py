"""Invalid requests are refused with one line before they are sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.client import AllocationBody, Client, MoveBody, Need, Quota
from slicewise.client.calls import allocate
from slicewise.core.errors import SlicewiseError

MOVE = MoveBody(
    allocation="a1",
    profile="1g.10gb",
    node="n1",
    gpu=0,
    start=0,
    to_node="n1",
    to_gpu=-1,
    to_start=0,
)
NAMES = "expected 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"


def never(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"{request.method} {request.url} was sent")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.allocate("3g 40gb"), f"invalid profile: {NAMES}"),
        (lambda c: c.allocate(3), "invalid profile: expected str | null, got int"),
        (lambda c: c.allocate("1g.10gb", count=0), "invalid count: expected int >= 1"),
        (lambda c: c.allocate("1g.10gb", count=65), "invalid count: expected int <= 64"),
        (lambda c: c.allocate("1g.10gb", count=1.5), "invalid count: expected int, got float"),
        (lambda c: c.allocate("1g.10gb", count="2"), "invalid count: expected int, got str"),
        (lambda c: c.allocate("1g.10gb", priority=101), "invalid priority: expected int <= 100"),
        (
            lambda c: c.allocate("1g.10gb", wait_seconds=-1),
            "invalid wait_seconds: expected float >= 0",
        ),
        (
            lambda c: c.allocate("1g.10gb", wait_seconds=float("nan")),
            "invalid wait_seconds: expected float ",
        ),
        (
            lambda c: c.allocate("1g.10gb", lease_seconds=0),
            "invalid lease_seconds: expected float > 0",
        ),
        (lambda c: c.allocate("1g.10gb", tenant="a/b"), f"invalid tenant: {NAMES}"),
        (
            lambda c: c.allocate("1g.10gb", labels={"a": "x" * 257}),
            "invalid labels[...]: expected str of length <= 256",
        ),
        (lambda c: c.allocate("1g.10gb", labels={"-a": "x"}), f"invalid labels: {NAMES}"),
        (
            lambda c: c.allocate("1g.10gb", labels={"a": 1}),
            "invalid labels[...]: expected str",
        ),
        (
            lambda c: c.allocate("1g.10gb", labels={f"k{i}": "" for i in range(17)}),
            "invalid labels: expected object of length <= 16",
        ),
        (
            lambda c: c.allocate("1g.10gb", models=[""]),
            "invalid models[0]: expected str of",
        ),
        (lambda c: c.allocate("1g.10gb", tenant=object()), "invalid request: "),
        (lambda c: c.allocate("1g.10gb", labels={"a": "\ud800"}), "invalid request: "),
        (lambda c: c.allocate(Need(65, 1)), "invalid need.compute: expected int <= 64"),
        (lambda c: c.dry_run("1g.10gb", count=0), "invalid count: expected int >= 1"),
        (lambda c: c.allocate_all([]), "invalid allocations: expected array of length >= 1"),
        (
            lambda c: c.allocate_all(
                [AllocationBody(profile="1g.10gb"), AllocationBody(profile="1g.10gb", count=99)]
            ),
            "invalid allocations[1].count: expected int <= 64",
        ),
        (lambda c: c.add_node("n1", "A100-80GB", 0), "invalid gpus: expected int >= 1"),
        (lambda c: c.add_node("", "A100-80GB", 1), f"invalid name: {NAMES}"),
        (
            lambda c: c.add_tenant("acme", Quota(instances=-1)),
            "invalid quota.instances: expected int >= 0",
        ),
        (
            lambda c: c.change_quota("acme", requests_per_second=0),
            "invalid quota.requests_per_second: expected float > 0",
        ),
        (lambda c: c.issue_token("king"), "unknown role 'king'; known: admin, operator, tenant"),
        (
            lambda c: c.issue_token("tenant", tenant="acme", note="x" * 257),
            "invalid note: expected str of length <= 256",
        ),
        (lambda c: c.carry_out([MOVE]), "invalid moves[0].to_gpu: expected int >= 0"),
        (
            lambda c: c.issue_token("admin", expires_in_seconds=math.nan),
            "invalid expires_in_seconds: expected float ",
        ),
        (
            lambda c: c.allocate("1g.10gb", lease_seconds=math.inf),
            "invalid lease_seconds: expected float ",
        ),
        (
            lambda c: c.add_tenant("acme", Quota(requests_per_second=math.nan)),
            "invalid quota.requests_per_second: expected float ",
        ),
        (
            lambda c: c.allocate_all([AllocationBody(profile="1g.10gb", lease_seconds=math.inf)]),
            "invalid allocations[0].lease_seconds: expected float ",
        ),
        (lambda c: c.allocation("a" * 70_000), "invalid request: URL too long"),
        (lambda c: list(c.allocations(labels={"a": "\ud800"})), "invalid request: "),
        (lambda c: list(c.allocations(node="b" * 70_000)), "invalid request: "),
        (lambda c: c.allocation(""), "'' is not a valid name or id"),
        (lambda c: c.release("a/b"), "'a/b' is not a valid name or id"),
        (lambda c: c.remove_node(".."), "'..' is not a valid name or id"),
    ],
)
def test_an_invalid_request_is_not_sent(call: Callable[[Any], object], message: str) -> None:
    with (
        Client("http://a", "sw_x", transport=httpx.MockTransport(never)) as client,
        pytest.raises(SlicewiseError) as refused,
    ):
        call(client)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@given(
    st.builds(
        dict,
        profile=st.text(max_size=8) | st.none(),
        count=st.integers() | st.floats() | st.text(max_size=3),
        priority=st.integers(-200, 200),
        wait_seconds=st.floats() | st.none(),
        labels=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3),
        tenant=st.text(max_size=4) | st.none(),
    )
)
def test_any_input_is_encoded_or_refused_in_one_line(given: dict[str, Any]) -> None:
    problem = ""
    try:
        data = allocate(AllocationBody(**given)).body or b""
    except SlicewiseError as error:
        problem = str(error)
    assert len(problem.splitlines()) == 1 if problem else data.startswith(b"{")
