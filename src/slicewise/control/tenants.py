"""Tenants and their tokens."""

from __future__ import annotations

from slicewise.control.actors import expired
from slicewise.control.answers import Answer, RefusedError, json_answer
from slicewise.control.commands import (
    IssueToken,
    RemoveTenant,
    RevokeToken,
    RotateToken,
    SetTenant,
)
from slicewise.control.unit_of_work import UnitOfWork
from slicewise.control.views import tenant_view, token_view
from slicewise.journal.entries import (
    QuotaRecord,
    TenantRef,
    TenantRemoved,
    TenantSet,
    TokenExpiring,
    TokenIssued,
    TokenRevoked,
)


class Tenants:
    """Creates, changes and removes tenants; issues, rotates and revokes tokens."""

    def __init__(self, work: UnitOfWork) -> None:
        self._work = work
        self._state = work.state

    # Tenants

    def set_tenant(self, command: SetTenant) -> Answer:
        """Create a tenant, or change its terms."""
        name = command.tenant
        _check_terms(command.quota)
        if not command.new:
            ref = self._work.tenant(name).ref
        elif name in self._state.tenants_by_name:
            raise RefusedError(409, f"tenant {name!r} already exists", reason="exists")
        else:
            # Unique, because no other entry has this number; never a name, because of the colon.
            ref = TenantRef(f"tenant:{self._state.seq + 1}", name)
        self._work.enter(TenantSet(ref, command.quota))
        self._work.room_appeared = True
        status = 201 if command.new else 200
        return json_answer(status, tenant_view(self._state.tenants[ref.id]))

    def remove_tenant(self, command: RemoveTenant) -> Answer:
        """Remove a tenant without allocations."""
        tenant = self._work.tenant(command.tenant)
        if tenant.allocations:
            raise RefusedError(
                409,
                f"tenant {tenant.name!r} still has {len(tenant.allocations)} allocations: "
                "release them first",
                reason="busy",
            )
        view = tenant_view(tenant)
        self._work.enter(TenantRemoved(tenant.ref))
        return json_answer(200, view)

    # Tokens

    def issue_token(self, command: IssueToken) -> Answer:
        """Issue a token."""
        tenant = None if command.tenant is None else self._work.tenant(command.tenant).ref
        if command.digest in self._state.tokens_by_digest:
            raise RefusedError(409, "a token with this secret already exists", reason="exists")
        expires = None if command.expires_in is None else self._work.now + command.expires_in
        token = TokenIssued(
            self._work.new_id("t"),
            command.digest,
            command.role,
            tenant,
            command.node,
            command.note,
            expires,
        )
        self._work.enter(token)
        return json_answer(201, token_view(token))

    def rotate_token(self, command: RotateToken) -> Answer:
        """Issue a new token with the rights of an old one; both stay valid for the overlap."""
        old, now = self._token(command.token), self._work.now
        if expired(old, now):
            raise RefusedError(
                409, f"token {old.token!r} has expired: issue another", reason="expired"
            )
        if command.digest in self._state.tokens_by_digest:
            raise RefusedError(409, "a token with this secret already exists", reason="exists")
        until = now + command.overlap
        new = TokenIssued(
            self._work.new_id("t"),
            command.digest,
            old.role,
            old.tenant,
            old.node,
            old.note,
            old.expires if command.expires_in is None else now + command.expires_in,
            old.token,
        )
        self._work.enter(new)
        if old.expires is None or until < old.expires:
            self._work.enter(TokenExpiring(old.token, until))
        return json_answer(201, token_view(new))

    def revoke_token(self, command: RevokeToken) -> Answer:
        """Revoke a token."""
        token = self._token(command.token)
        self._work.enter(TokenRevoked(token.token))
        return json_answer(200, token_view(token))

    def _token(self, identity: str) -> TokenIssued:
        token = self._state.tokens.get(identity)
        if token is None:
            raise RefusedError(404, f"no token {identity!r}")
        return token


def _check_terms(quota: QuotaRecord) -> None:
    """Refuse terms that contradict each other."""
    slices = quota.memory_slices
    if slices is not None and quota.guarantee > slices:
        raise RefusedError(
            400,
            f"the guarantee of {quota.guarantee} memory slices exceeds the quota of {slices}: "
            "lower the guarantee, or raise memory_slices",
            field="quota.guarantee",
        )
    default, longest = quota.default_lease_seconds, quota.max_lease_seconds
    if default is not None and longest is not None and default > longest:
        raise RefusedError(
            400,
            f"the default lease of {default:g} seconds exceeds the maximum of {longest:g}: "
            "lower default_lease_seconds, or raise max_lease_seconds",
            field="quota.default_lease_seconds",
        )
