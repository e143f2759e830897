"""Hooks of schemathesis: what it must know about the service, and what it must not do to itself.

It learns ids from the answers, among them ids of tokens. If it revoked its own token, it would get
only 401 afterwards, and every check would pass.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from schemathesis.openapi.checks import UseAfterFree

OWN_TOKEN = "SCHEMA_OWN_TOKEN"
"""The variable with the id of the run's own token."""
FIRST_SESSION = "SCHEMA_FIRST_SESSION"
"""The variable with the agent session that the examples use."""

_sessions = [os.environ.get(FIRST_SESSION, "")]


@schemathesis.hook
def map_path_parameters(
    context: schemathesis.HookContext, path_parameters: dict[str, Any]
) -> dict[str, Any]:
    """Replace the id of the run's own token, to keep it from being revoked."""
    own = os.environ.get(OWN_TOKEN)
    if own and path_parameters and path_parameters.get("id") == own:
        return {**path_parameters, "id": "another-token"}
    return path_parameters


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]
) -> None:
    """Replace it also in cases derived from an answer."""
    case.path_parameters = map_path_parameters(context, case.path_parameters)
    for values in (case.query, case.body):
        if isinstance(values, dict) and values.get("session") == os.environ.get(FIRST_SESSION):
            values["session"] = _sessions[-1]


@schemathesis.hook
def after_call(
    context: schemathesis.HookContext,
    case: schemathesis.Case[Any],
    response: schemathesis.Response,
) -> None:
    """Remember the newest session, because it ends the previous one."""
    if case.operation.path == "/v1/agent/hello" and response.status_code == 200:
        _sessions.append(response.json()["session"])


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext,
    failure: Exception,
    case: schemathesis.Case[Any],
    response: schemathesis.Response,
) -> bool:
    """Ignore use-after-free findings for allocations: a released one can still be read."""
    told = case.operation.path == "/v1/allocations/{id}"
    return not (told and isinstance(failure, UseAfterFree))
