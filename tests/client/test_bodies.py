"""What cannot be asked for is refused before it is sent, in a sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.client import AllocationBody, Client, MoveBody, Need, Quota
from slicewise.client.bodies import checked
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
NAMES = "must be 1 to 63 letters, digits and marks such as '.' and '-', a letter or digit first"


def never(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"{request.method} {request.url} was sent")


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda c: c.allocate("3g 40gb"), f"profile {NAMES}, not '3g 40gb'"),
        (lambda c: c.allocate(3), "profile must be text or nothing, not 3"),
        (lambda c: c.allocate("1g.10gb", count=0), "count must be at least 1, not 0"),
        (lambda c: c.allocate("1g.10gb", count=65), "count must be at most 64, not 65"),
        (lambda c: c.allocate("1g.10gb", count=1.5), "count must be a whole number, not 1.5"),
        (lambda c: c.allocate("1g.10gb", count="2"), "count must be a whole number, not '2'"),
        (lambda c: c.allocate("1g.10gb", priority=101), "priority must be at most 100, not 101"),
        (
            lambda c: c.allocate("1g.10gb", wait_seconds=-1),
            "wait_seconds must be at least 0, not -1",
        ),
        (
            lambda c: c.allocate("1g.10gb", wait_seconds=float("nan")),
            "wait_seconds must be a number, not nan",
        ),
        (
            lambda c: c.allocate("1g.10gb", lease_seconds=0),
            "lease_seconds must be more than 0, not 0",
        ),
        (lambda c: c.allocate("1g.10gb", tenant="a/b"), f"tenant {NAMES}, not 'a/b'"),
        (
            lambda c: c.allocate("1g.10gb", labels={"a": "x" * 257}),
            "labels must have at most 256 characters",
        ),
        (lambda c: c.allocate("1g.10gb", labels={"-a": "x"}), f"labels {NAMES}"),
        (lambda c: c.allocate("1g.10gb", labels={"a": 1}), "labels must be text"),
        (
            lambda c: c.allocate("1g.10gb", labels={f"k{i}": "" for i in range(17)}),
            "labels must have at most 16 items",
        ),
        (lambda c: c.allocate("1g.10gb", models=[""]), "models[0] must not be empty, not ''"),
        (lambda c: c.allocate("1g.10gb", tenant=object()), "this cannot be sent: "),
        (lambda c: c.allocate("1g.10gb", labels={"a": "\ud800"}), "this cannot be sent: "),
        (lambda c: c.allocate(Need(65, 1)), "need.compute must be at most 64, not 65"),
        (lambda c: c.dry_run("1g.10gb", count=0), "count must be at least 1, not 0"),
        (lambda c: c.allocate_all([]), "allocations must not be empty"),
        (
            lambda c: c.allocate_all(
                [AllocationBody(profile="1g.10gb"), AllocationBody(profile="1g.10gb", count=99)]
            ),
            "allocations[1].count must be at most 64, not 99",
        ),
        (lambda c: c.add_node("n1", "A100-80GB", 0), "gpus must be at least 1, not 0"),
        (lambda c: c.add_node("", "A100-80GB", 1), f"name {NAMES}, not ''"),
        (
            lambda c: c.add_tenant("acme", Quota(instances=-1)),
            "quota.instances must be at least 0, not -1",
        ),
        (
            lambda c: c.change_quota("acme", requests_per_second=0),
            "quota.requests_per_second must be more than 0, not 0",
        ),
        (lambda c: c.issue_token("king"), "unknown role 'king'; known: admin, operator, tenant"),
        (
            lambda c: c.issue_token("tenant", tenant="acme", note="x" * 257),
            f"note must have at most 256 characters, not '{'x' * 40}...",
        ),
        (lambda c: c.carry_out([MOVE]), "moves[0].to_gpu must be at least 0, not -1"),
        (
            lambda c: c.issue_token("admin", expires_in_seconds=math.nan),
            "expires_in_seconds must be a number, not nan",
        ),
        (
            lambda c: c.allocate("1g.10gb", lease_seconds=math.inf),
            "lease_seconds must be a number, not inf",
        ),
        (
            lambda c: c.add_tenant("acme", Quota(requests_per_second=math.nan)),
            "quota.requests_per_second must be a number, not nan",
        ),
        (
            lambda c: c.allocate_all([AllocationBody(profile="1g.10gb", lease_seconds=math.inf)]),
            "allocations[0].lease_seconds must be a number, not inf",
        ),
        (lambda c: c.allocation("a" * 70_000), "this cannot be asked for: URL too long"),
        (lambda c: list(c.allocations(labels={"a": "\ud800"})), "this cannot be asked for: "),
        (lambda c: list(c.allocations(node="b" * 70_000)), "this cannot be asked for: "),
        (lambda c: c.allocation(""), "'' is no name or id of anything"),
        (lambda c: c.release("a/b"), "'a/b' is no name or id of anything"),
        (lambda c: c.remove_node(".."), "'..' is no name or id of anything"),
    ],
)
def test_sentences(ask: Callable[[Any], object], sentence: str) -> None:
    with (
        Client("http://a", "sw_x", transport=httpx.MockTransport(never)) as client,
        pytest.raises(SlicewiseError) as refused,
    ):
        ask(client)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


class Odd(msgspec.Struct):
    """A body with a limit that no body of the service has."""

    number: Annotated[int, msgspec.Meta(multiple_of=7)]


def test_a_limit_nobody_foresaw_is_told_as_it_is() -> None:
    with pytest.raises(SlicewiseError) as refused:
        checked(Odd(8))
    assert str(refused.value) == (
        "number is not as it should be: Expected `int` that's a multiple of 7, not 8"
    )


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
def test_whatever_is_given_is_sent_or_refused_in_one_line(given: dict[str, Any]) -> None:
    problem = ""
    try:
        data = checked(AllocationBody(**given))
    except SlicewiseError as error:
        problem = str(error)
    assert len(problem.splitlines()) == 1 if problem else data.startswith(b"{")
