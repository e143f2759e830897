"""What schemathesis must be told about the service, and what it must not do to itself.

It learns ids from the answers it gets, the ids of tokens among them. Were it to revoke the token
it asks with, it would get nothing but 401 from then on, and every check would pass.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis
from schemathesis.openapi.checks import UseAfterFree

OWN_TOKEN = "SCHEMA_OWN_TOKEN"
"""The variable that holds the id of the token."""
FIRST_SESSION = "SCHEMA_FIRST_SESSION"
"""The variable that holds the session of an agent, which examples speak of."""

_sessions = [os.environ.get(FIRST_SESSION, "")]


@schemathesis.hook
def map_path_parameters(
    context: schemathesis.HookContext, path_parameters: dict[str, Any]
) -> dict[str, Any]:
    """Have somebody else's token revoked instead."""
    own = os.environ.get(OWN_TOKEN)
    if own and path_parameters and path_parameters.get("id") == own:
        return {**path_parameters, "id": "somebody-elses"}
    return path_parameters


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]
) -> None:
    """The same where a case is not generated, but follows from an answer."""
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
    """A new session ends the one before it, so the newest is the one to go on with."""
    if case.operation.path == "/v1/agent/hello" and response.status_code == 200:
        _sessions.append(response.json()["session"])


@schemathesis.hook
def filter_failure(
    context: schemathesis.HookContext,
    failure: Exception,
    case: schemathesis.Case[Any],
    response: schemathesis.Response,
) -> bool:
    """An allocation that was released is still told, as it was: that is no mistake."""
    told = case.operation.path == "/v1/allocations/{id}"
    return not (told and isinstance(failure, UseAfterFree))
