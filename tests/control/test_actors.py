"""The handler checks the token of a command when it decides it."""

from __future__ import annotations

from tests.control.control_plane import ControlPlane

from slicewise.control.actors import bearer, internal
from slicewise.control.commands import (
    Create,
    IssueToken,
    RemoveTenant,
    RevokeToken,
    RotateToken,
    SetTenant,
    Terms,
)
from slicewise.journal.entries import QuotaRecord, Role, TokenIssued, Want


def token(control: ControlPlane, **order: object) -> TokenIssued:
    status, view = control.ask(IssueToken(f"d{len(control.rows)}", **order))  # type: ignore[arg-type]
    assert status == 201, view
    return control.state.tokens[view["id"]]


def status(control: ControlPlane, caller: TokenIssued, origin: str = "") -> int:
    command = Create("acme", Terms(Want(profile="1g.10gb")))
    return control.handler.decide(command, bearer(caller, origin), control.now).status


def made() -> ControlPlane:
    control = ControlPlane()
    control.tenant()
    control.node(gpus=4)
    return control


def test_a_token_revoked_in_the_same_batch_is_refused() -> None:
    control = made()
    mine = token(control, role=Role.ADMIN)
    assert status(control, mine, "192.0.2.1") == 201
    (row,) = control.handler.take_rows()
    assert (row.actor, row.origin) == (mine.token, "192.0.2.1")
    control.handler.decide(RevokeToken(mine.token), internal("service"), control.now)
    assert status(control, mine) == 401
    assert len(control.handler.take_rows()) == 1, "that it was revoked"


def test_an_expired_token_is_refused() -> None:
    control = made()
    mine = token(control, role=Role.TENANT, tenant="acme", expires_in=10)
    control.now += 9
    assert status(control, mine) == 201
    control.now += 1
    assert status(control, mine) == 401


def test_a_token_of_a_removed_tenant_is_refused_for_the_next_of_its_name() -> None:
    control = made()
    mine = token(control, role=Role.TENANT, tenant="acme")
    assert control.ask(RemoveTenant("acme"))[0] == 200
    assert control.ask(SetTenant("acme", QuotaRecord(), new=True))[0] == 201
    assert status(control, mine) == 401


def test_a_forged_token_is_refused() -> None:
    control = made()
    forged = TokenIssued("service", "digest", Role.ADMIN)
    assert status(control, forged) == 401
    mine = token(control, role=Role.OPERATOR)
    other = TokenIssued(mine.token, mine.digest, Role.ADMIN)
    assert status(control, other) == 401, "with more rights than it has"


def test_a_rotated_token_is_valid_until_the_overlap_ends() -> None:
    control = made()
    old = token(control, role=Role.OPERATOR, note="robot")
    code, view = control.ask(RotateToken(old.token, "fresh", overlap=60))
    assert code == 201
    new = control.state.tokens[view["id"]]
    assert (new.role, new.note, new.replaces, new.expires) == (
        Role.OPERATOR, "robot", old.token, None,
    )  # fmt: skip
    assert status(control, old) == status(control, new) == 201
    control.now += 60
    assert (status(control, old), status(control, new)) == (401, 201)
    assert control.ask(RotateToken(new.token, "fresh", overlap=0))[0] == 409, "the same secret"
