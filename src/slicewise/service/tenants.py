"""Tenants and tokens: who may use the service, and how much of it."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from slicewise.control.answers import RefusedError, said
from slicewise.control.commands import IssueToken, RemoveTenant, RevokeToken, RotateToken, SetTenant
from slicewise.control.entries import QuotaRecord, Role
from slicewise.control.reports import TenantPage, TenantPatch, TokenPage, WhoView
from slicewise.control.views import tenant_view, token_view
from slicewise.control.wire import (
    NewTokenView,
    RotateBody,
    TenantBody,
    TokenBody,
    TokenView,
    moment,
)
from slicewise.service.auth import digest_of, new_secret
from slicewise.service.http import Reply, Request, reply
from slicewise.service.pages import PageQuery, page_by_name
from slicewise.service.site import REPLAYED, Site

_decode_token = msgspec.json.Decoder(TokenView).decode


async def add(site: Site, request: Request) -> Reply:
    """Create a tenant."""
    body = await request.body(TenantBody)
    quota = msgspec.convert(msgspec.to_builtins(body.quota), QuotaRecord)
    return await site.write(request, SetTenant(body.name, quota, new=True))


async def every(site: Site, request: Request) -> Reply:
    """Some of the tenants, by name; a tenant sees itself."""
    query = request.query(PageQuery)
    state = site.state
    seen = (name for name in state.tenants if request.caller.sees(name))
    names, following = page_by_name(seen, site.page(query.limit), query.cursor)
    views = tuple(tenant_view(state, state.tenants[name]) for name in names)
    return reply(said(200, TenantPage(tenants=views, next=following)))


async def get(site: Site, request: Request) -> Reply:
    """A tenant."""
    name = request.parts[0]
    tenant = site.state.tenants.get(name)
    if tenant is None or not request.caller.sees(name):
        raise RefusedError(404, f"no tenant {name!r}")
    return reply(said(200, tenant_view(site.state, tenant)))


async def change(site: Site, request: Request) -> Reply:
    """Change a tenant's quota: what is left out stays as it is."""
    body = await request.body(TenantPatch)
    name = request.parts[0]
    # One at a time: a change is made to what the change before it left.
    async with site.patching:
        tenant = site.state.tenants.get(name)
        if tenant is None:
            raise RefusedError(404, f"no tenant {name!r}")
        given = {
            name: value
            for name in QuotaRecord.__struct_fields__
            if (value := getattr(body.quota, name)) is not UNSET
        }
        quota = msgspec.structs.replace(tenant.quota, **given)
        return await site.write(request, SetTenant(name, quota, new=False))


async def remove(site: Site, request: Request) -> Reply:
    """Remove a tenant that holds nothing."""
    return await site.write(request, RemoveTenant(request.parts[0]))


async def issue_token(site: Site, request: Request) -> Reply:
    """Issue a token; its secret is shown this once."""
    body = await request.body(TokenBody)
    _check(body)
    secret = new_secret()
    answered = await site.write(
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
    return _with_secret(answered, secret)


async def rotate_token(site: Site, request: Request) -> Reply:
    """Issue another token in the stead of one, which stays valid for a while."""
    body = await request.body_if_any(RotateBody)
    secret = new_secret()
    command = RotateToken(
        request.parts[0], digest_of(secret), body.overlap_seconds, body.expires_in_seconds
    )
    return _with_secret(await site.write(request, command), secret)


def _with_secret(answered: Reply, secret: str) -> Reply:
    """The answer about a token just issued, with its secret, which is kept nowhere."""
    if answered.status != 201:
        return answered
    view = _decode_token(answered.body)
    if REPLAYED in answered.headers:
        raise RefusedError(
            409,
            f"token {view.id} was issued with this Idempotency-Key before, and its secret was "
            "shown then: revoke it, and issue another",
        )
    return reply(said(201, NewTokenView(**msgspec.structs.asdict(view), token=secret)))


def _check(body: TokenBody) -> None:
    """A token is for somebody: a tenant's names its tenant, an agent's its node."""
    role = body.role
    if role is Role.TENANT and body.tenant is None:
        raise RefusedError(400, "a tenant's token must name its tenant", field="tenant")
    if role not in (Role.TENANT, Role.READ_ONLY) and body.tenant is not None:
        raise RefusedError(400, f"a token of role {role} belongs to no tenant", field="tenant")
    if role is Role.AGENT and body.node is None:
        raise RefusedError(400, "an agent's token must name its node", field="node")
    if role is not Role.AGENT and body.node is not None:
        raise RefusedError(400, f"a token of role {role} belongs to no node", field="node")


async def tokens(site: Site, request: Request) -> Reply:
    """Some of the tokens, by id, without their secrets."""
    query = request.query(PageQuery)
    state = site.state
    ids, following = page_by_name(state.tokens, site.page(query.limit), query.cursor)
    views = tuple(token_view(state.tokens[identity]) for identity in ids)
    return reply(said(200, TokenPage(tokens=views, next=following)))


async def revoke_token(site: Site, request: Request) -> Reply:
    """Make a token void."""
    return await site.write(request, RevokeToken(request.parts[0]))


async def whoami(site: Site, request: Request) -> Reply:
    """Who the bearer of this token is."""
    token = request.caller.token
    return reply(
        said(
            200,
            WhoView(
                id=token.token,
                role=token.role,
                tenant=token.tenant,
                node=token.node,
                note=token.note,
                expires_at=moment(token.expires),
            ),
        )
    )
