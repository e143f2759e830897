"""Query parameters are decoded by type; errors name the parameter and the expected value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from slicewise.control.answers import RefusedError
from slicewise.server.requests import HttpRequest, Query
from slicewise.server.routes.table import ROUTES


class Everything(Query, frozen=True):
    """One parameter of each kind; the texts name other kinds, and are text all the same."""

    style: Literal["print", "raw", "bool"] = "raw"
    text: str | None = None
    words: tuple[Literal["tuple[int]", "plain"], ...] = ()
    flag: bool = False
    maybe: bool | None = None
    count: Annotated[int, Meta(ge=0, le=1000, description="How many.")] | None = None
    load: Annotated[float, Meta(gt=0)] = 1.0
    sizes: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=2)] = ()


def read(query: str) -> Everything:
    async def nothing_comes() -> Any:
        raise AssertionError("a query is read without the body")

    scope = {"method": "GET", "path": "/", "headers": [], "query_string": query.encode()}
    return HttpRequest(scope, nothing_comes, 0).query(Everything)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", Everything()),
        ("style=print", Everything(style="print")),
        ("style=bool&text=1", Everything(style="bool", text="1")),
        ("text=null", Everything(text="null")),
        ("text=", Everything(text="")),
        ("words=plain", Everything(words=("plain",))),
        ("words=plain&words=tuple[int]", Everything(words=("plain", "tuple[int]"))),
        ("flag=true&maybe=false", Everything(flag=True, maybe=False)),
        ("count=0", Everything(count=0)),
        ("count=%31%30", Everything(count=10)),
        ("load=2", Everything(load=2.0)),
        ("load=0.5", Everything(load=0.5)),
        ("sizes=3&sizes=1", Everything(sizes=(3, 1))),
    ],
)
def test_parameters_are_decoded_by_type(query: str, expected: Everything) -> None:
    assert read(query) == expected


@pytest.mark.parametrize(
    ("query", "field", "problem"),
    [
        ("style=int", "style", "Invalid enum value 'int'"),
        ("words=plain&words=x", "words[1]", "Invalid enum value 'x'"),
        ("flag=1", "flag", "parameter 'flag' must be true or false"),
        ("flag=True", "flag", "parameter 'flag' must be true or false"),
        ("flag=", "flag", "parameter 'flag' must be true or false"),
        ("maybe=null", "maybe", "parameter 'maybe' must be true or false"),
        ("count=null", "count", "parameter 'count' must be a whole number"),
        ("count=x", "count", "parameter 'count' must be a whole number"),
        ("count=", "count", "parameter 'count' must be a whole number"),
        ("count=1.5", "count", "parameter 'count' must be a whole number"),
        ("count=٣", None, "the query string cannot be decoded"),
        ("count=%D9%A3", "count", "parameter 'count' must be a whole number"),
        ("count=1_0", "count", "parameter 'count' must be a whole number"),
        ("count=" + "9" * 5000, "count", "parameter 'count' must be a whole number"),
        ("count=" + "9" * 30, "count", "Expected `int` <= 1000"),
        ("count=-1", "count", "Expected `int` >= 0"),
        ("count=1&count=1", "count", "parameter 'count' is repeated"),
        ("text=a&text=a", "text", "parameter 'text' is repeated"),
        ("load=fast", "load", "parameter 'load' must be a number"),
        ("load=nan", "load", "parameter 'load' must be a number"),
        ("load=0", "load", "Expected `float` > 0.0"),
        ("sizes=1&sizes=x", "sizes", "parameter 'sizes' must be a whole number"),
        ("sizes=1&sizes=0", "sizes[1]", "Expected `int` >= 1"),
        ("sizes=1&sizes=2&sizes=3", "sizes", "of length <= 2"),
        ("other=1", None, "unknown field `other`"),
    ],
)
def test_errors_name_the_parameter(query: str, field: str | None, problem: str) -> None:
    with pytest.raises(RefusedError) as refused:
        read(query)
    assert refused.value.status == 400
    assert problem in str(refused.value)
    assert refused.value.field == field


def test_the_parameters_of_every_route_can_be_decoded() -> None:
    """On every route, an unknown parameter is refused with the same message."""
    for kind in {route.query for route in ROUTES if route.query is not None}:
        scope = {"method": "GET", "path": "/", "headers": [], "query_string": b"other=1"}
        with pytest.raises(RefusedError, match="unknown field `other`"):
            HttpRequest(scope, None, 0).query(kind)  # type: ignore[arg-type]  # nothing is received
