"""What schemathesis must not do to itself: revoke the token it asks with.

It learns ids from the answers it gets, the ids of tokens among them. Without its token it would
get nothing but 401 from then on, and every check would pass.
"""

from __future__ import annotations

import os
from typing import Any

import schemathesis

OWN_TOKEN = "SCHEMA_OWN_TOKEN"
"""The variable that holds the id of the token."""


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
