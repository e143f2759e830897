"""Tenants, their quotas, and tokens."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from slicewise.api.base import moment
from slicewise.api.tenants import (
    NewTokenView,
    RotateBody,
    TenantBody,
    TenantPage,
    TenantPatch,
    TokenBody,
    TokenPage,
    TokenView,
    WhoView,
)
from slicewise.control.answers import RefusedError, json_answer
from slicewise.control.commands import IssueToken, RemoveTenant, RevokeToken, RotateToken, SetTenant
from slicewise.control.views import tenant_view, token_view
from slicewise.journal.entries import QuotaRecord, Role
from slicewise.server.auth import digest_of, new_secret
from slicewise.server.context import REPLAYED, AppContext
from slicewise.server.pagination import PageQuery, page_by_name
from slicewise.server.requests import HttpRequest, Reply, reply

_decode_token = msgspec.json.Decoder(TokenView).decode


async def add(context: AppContext, request: HttpRequest) -> Reply:
    """Create a tenant."""
    body = await request.body(TenantBody)
    quota = msgspec.convert(msgspec.to_builtins(body.quota), QuotaRecord)
    return await context.write(request, SetTenant(body.name, quota, new=True))


async def list_page(context: AppContext, request: HttpRequest) -> Reply:
    """A page of tenants, by name. A tenant sees itself."""
    query = request.query(PageQuery)
    state = context.state
    seen = (name for name, one in state.tenants_by_name.items() if request.caller.sees(one.ref))
    names, following = page_by_name(seen, context.page(query.limit), query.cursor)
    views = tuple(tenant_view(state.tenants_by_name[name]) for name in names)
    return reply(json_answer(200, TenantPage(tenants=views, next=following)))


async def get(context: AppContext, request: HttpRequest) -> Reply:
    """A tenant."""
    name = request.parts[0]
    tenant = context.state.tenants_by_name.get(name)
    if tenant is None or not request.caller.sees(tenant.ref):
        raise RefusedError(404, f"no tenant {name!r}")
    return reply(json_answer(200, tenant_view(tenant)))


async def change(context: AppContext, request: HttpRequest) -> Reply:
    """Change the given terms of a tenant."""
    body = await request.body(TenantPatch)
    name = request.parts[0]
    # One change at a time: it is based on the result of the previous one.
    async with context.patching:
        tenant = context.state.tenants_by_name.get(name)
        if tenant is None:
            raise RefusedError(404, f"no tenant {name!r}")
        given = {
            name: value
            for name in QuotaRecord.__struct_fields__
            if (value := getattr(body.quota, name)) is not UNSET
        }
        quota = msgspec.structs.replace(tenant.quota, **given)
        return await context.write(request, SetTenant(name, quota, new=False))


async def remove(context: AppContext, request: HttpRequest) -> Reply:
    """Remove a tenant without allocations."""
    return await context.write(request, RemoveTenant(request.parts[0]))


async def issue_token(context: AppContext, request: HttpRequest) -> Reply:
    """Issue a token; its secret is shown only here."""
    body = await request.body(TokenBody)
    _check(body)
    secret = new_secret()
    answer = await context.write(
        request,
        IssueToken(
            digest_of(secret),
            body.role,
            body.tenant,
            body.node,
            body.note,
            body.expires_in_seconds,
        ),
    )
    return _with_secret(answer, secret)


async def rotate_token(context: AppContext, request: HttpRequest) -> Reply:
    """Issue a replacement for a token, which stays valid for the overlap."""
    body = await request.body_if_any(RotateBody)
    secret = new_secret()
    command = RotateToken(
        request.parts[0], digest_of(secret), body.overlap_seconds, body.expires_in_seconds
    )
    return _with_secret(await context.write(request, command), secret)


def _with_secret(answer: Reply, secret: str) -> Reply:
    """Add the secret, which is not stored, to the answer."""
    if answer.status != 201:
        return answer
    view = _decode_token(answer.body)
    if REPLAYED in answer.headers:
        raise RefusedError(
            409,
            f"token {view.id} was already issued with this Idempotency-Key, and a secret is shown "
            "only once: revoke it, and issue another",
        )
    return reply(json_answer(201, NewTokenView(**msgspec.structs.asdict(view), token=secret)))


def _check(body: TokenBody) -> None:
    """Refuse a token without the tenant or node that its role requires."""
    role = body.role
    if role is Role.TENANT and body.tenant is None:
        raise RefusedError(400, "a tenant's token must name its tenant", field="tenant")
    if role not in (Role.TENANT, Role.READ_ONLY) and body.tenant is not None:
        raise RefusedError(400, f"a token of role {role} belongs to no tenant", field="tenant")
    if role is Role.AGENT and body.node is None:
        raise RefusedError(400, "an agent's token must name its node", field="node")
    if role is not Role.AGENT and body.node is not None:
        raise RefusedError(400, f"a token of role {role} belongs to no node", field="node")


async def tokens(context: AppContext, request: HttpRequest) -> Reply:
    """A page of tokens, by id, without their secrets."""
    query = request.query(PageQuery)
    state = context.state
    ids, following = page_by_name(state.tokens, context.page(query.limit), query.cursor)
    views = tuple(token_view(state.tokens[identity]) for identity in ids)
    return reply(json_answer(200, TokenPage(tokens=views, next=following)))


async def revoke_token(context: AppContext, request: HttpRequest) -> Reply:
    """Revoke a token."""
    return await context.write(request, RevokeToken(request.parts[0]))


async def whoami(context: AppContext, request: HttpRequest) -> Reply:
    """The bearer of the token."""
    token = request.caller.token
    return reply(
        json_answer(
            200,
            WhoView(
                id=token.token,
                role=token.role,
                tenant=None if token.tenant is None else token.tenant.name,
                node=token.node,
                note=token.note,
                expires_at=moment(token.expires),
            ),
        )
    )
