"""The OpenAPI document, generated from the routes and the schemas of the API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, get_args, get_origin

import msgspec

from slicewise.api.base import Problem
from slicewise.control.answers import title_of
from slicewise.server.app import Route
from slicewise.server.auth import EVERYONE
from slicewise.server.context import AppContext
from slicewise.server.requests import HttpRequest, Reply
from slicewise.server.routes.events import PLACE

_REF = "#/components/schemas/{name}"
_PROBLEM = "application/problem+json"
_JSON = "application/json"
_KEY: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "A repeated request with the same key gets the first answer.",
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": 128,
        "pattern": "^[!-~]([ -~]{0,126}[!-~])?$",
    },
}
_KNOWN: dict[str, Any] = {
    "name": "If-None-Match",
    "in": "header",
    "description": "The ETag of the version that the caller has.",
    "schema": {"type": "string"},
}
_LAST_EVENT: dict[str, Any] = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The id of the last event received: the stream continues after it.",
    "schema": {"type": "string", "pattern": PLACE},
}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document of these routes."""
    types: list[Any] = [Problem]
    for route in routes:
        types += [kind for kind in route.answers.values() if not isinstance(kind, str)]
        types += [kind for kind in (route.body,) if kind is not None]
    _, components = msgspec.json.schema_components(dict.fromkeys(types), ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "slicewise",
            "version": version("slicewise"),
            "description": "Fragmentation-aware scheduling of NVIDIA Multi-Instance GPUs. "
            "Every GET route also answers HEAD.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "certificate": {"type": "mutualTLS"},
            },
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": (route.handler.__doc__ or "").strip(),
        "tags": [route.tag],
        "parameters": [*_parameters(route)],
        "responses": _responses(route),
    }
    if route.roles is None:
        operation["security"] = []
    elif route.certificate:
        operation["security"] = [{"token": []}, {"certificate": []}]
    if route.body is not None:
        operation["requestBody"] = {
            "required": not route.optional_body,
            "content": {_JSON: {"schema": _schema(route.body)}},
        }
    return operation


def _parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in route.parameters:
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
    if route.query is not None:
        _, components = msgspec.json.schema_components([route.query], ref_template=_REF)
        for name, schema in components[route.query.__name__]["properties"].items():
            schema = _without_null(schema)
            parameter = {"name": name, "in": "query", "schema": schema}
            if "description" in schema:
                parameter["description"] = schema.pop("description")
            yield parameter
    if route.key:
        yield _KEY
    if "text/event-stream" in route.answers.values():
        yield _LAST_EVENT
    if 304 in route.answers:
        yield _KNOWN


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an optional parameter without null, which a query cannot express."""
    options = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(options) == 1:
        schema = options[0]
    if "enum" in schema:
        schema = {**schema, "enum": [value for value in schema["enum"] if value is not None]}
    return {name: value for name, value in schema.items() if name != "default" or value is not None}


def error_statuses(route: Route) -> set[int]:
    """All error statuses of a route."""
    statuses = set(route.problems) | {503}
    if route.roles is not None:
        statuses |= {400, 401, 429}
        if route.roles != EVERYONE:
            statuses.add(403)
    if route.body is not None:
        statuses |= {413, 415}
    if route.key:
        statuses.add(422)
    if route.roles is None:
        statuses -= {503} - set(route.problems)
        if not route.unlimited:
            statuses.add(429)
    return statuses | {431}  # the head of a request is limited for every route


def _responses(route: Route) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in route.answers.items():
        if status == 304:
            responses[str(status)] = {"description": "The caller has the current version."}
            continue
        if isinstance(kind, str):
            content: dict[str, Any] = {
                kind: {"schema": {"type": "object" if kind == _JSON else "string"}}
            }
            text = route.summary
        else:
            content = {_JSON: {"schema": _schema(kind)}}
            text = route.summary if get_origin(kind) else (kind.__doc__ or "").strip()
        responses[str(status)] = {"description": text, "content": content}
        if route.key and status < 400:
            responses[str(status)]["headers"] = {
                "Idempotency-Replayed": {
                    "description": "true if the answer is that of an earlier request.",
                    "schema": {"type": "string", "enum": ["true"]},
                }
            }
    for status in sorted(error_statuses(route) - set(route.answers)):
        responses[str(status)] = {
            "description": title_of(status),
            "content": {_PROBLEM: {"schema": _schema(Problem)}},
        }
        if status in (429, 503):
            responses[str(status)]["headers"] = {
                "Retry-After": {
                    "description": "Seconds to wait before the next attempt.",
                    "schema": {"type": "integer"},
                }
            }
    return dict(sorted(responses.items()))


def _schema(kind: type) -> dict[str, Any]:
    if get_origin(kind) is list:
        return {"type": "array", "items": _schema(*get_args(kind))}
    return {"$ref": _REF.format(name=kind.__name__)}


async def openapi(context: AppContext, request: HttpRequest) -> Reply:
    """This document."""
    return Reply(200, context.document)
