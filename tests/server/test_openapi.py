"""The OpenAPI document is complete, and answers conform to it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS as CHECKS_BY_NAME
from schemathesis.core.result import Ok
from tests.server.harness import Harness

from slicewise.api.base import Problem
from slicewise.server.openapi import document, error_statuses
from slicewise.server.routes.table import ROUTES


def test_every_route_is_documented(harness: Harness) -> None:
    answer = harness.get("/openapi.json", token=None)
    assert answer.status_code == 200
    served = answer.json()
    assert served["openapi"] == "3.1.0"
    operations = {
        (method.upper(), path): operation
        for path, methods in served["paths"].items()
        for method, operation in methods.items()
    }
    assert set(operations) == {(route.method, route.path) for route in ROUTES}
    names = [operation["operationId"] for operation in operations.values()]
    assert len(set(names)) == len(names)
    for route in ROUTES:
        operation = operations[route.method, route.path]
        listed = {int(status) for status in operation["responses"]}
        assert listed == set(route.answers) | error_statuses(route)
        assert operation["summary"]
        assert operation["description"].endswith(".")
        in_path = [p["name"] for p in operation["parameters"] if p["in"] == "path"]
        assert in_path == re.findall(r"{(\w+)}", route.path)


def references(part: Any) -> set[str]:
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*(references(value) for value in part.values()))
    if isinstance(part, list):
        return set().union(*(references(value) for value in part))
    return set()


def test_all_references_resolve() -> None:
    made = document(ROUTES)
    known = {f"#/components/schemas/{name}" for name in made["components"]["schemas"]}
    assert references(made) <= known
    assert f"#/components/schemas/{Problem.__name__}" in known


@pytest.mark.parametrize("route", [r for r in ROUTES if r.writes], ids=lambda r: r.name)
def test_writes_may_be_refused_by_a_standby(route: Any) -> None:
    assert 503 in error_statuses(route)


# Requests generated from the document, valid and invalid.

SCHEMA = schemathesis.openapi.from_dict(document(ROUTES))
OPERATIONS: list[Any] = [
    found.ok()
    for found in SCHEMA.get_all_operations()
    if isinstance(found, Ok) and found.ok().path != "/v1/events"  # whose answer does not end
]
CHECKS = CHECKS_BY_NAME.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
    ]
)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """A service for generated requests."""
    harness = Harness(tmp_path_factory.mktemp("fuzzed"))
    harness.node(gpus=8)
    yield harness
    harness.close()


@pytest.mark.parametrize("with_token", [True, False], ids=["token", "no token"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.definition.raw["operationId"])
def test_all_answers_are_documented(fuzzed: Harness, operation: Any, with_token: bool) -> None:
    agent_token = fuzzed.token("agent", node="n9")
    strategy = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )

    @settings(max_examples=10, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=strategy)
    def fuzz(case: Any) -> None:
        sent = case.as_transport_kwargs(base_url="http://test")
        request: Any = requests.Request(**sent).prepare()
        headers = {k: v for k, v in request.headers.items() if k.lower() != "authorization"}
        if with_token:
            own = case.operation.path.startswith("/v1/agent/")
            headers["authorization"] = f"Bearer {agent_token if own else fuzzed.admin}"
        body = request.body.encode() if isinstance(request.body, str) else request.body
        answer = fuzzed.raw(request.method, request.url, headers, body)
        case.validate_response(answer, checks=CHECKS)
        if not with_token and case.operation.definition.raw.get("security") != []:
            assert answer.status_code == 401

    fuzz()
