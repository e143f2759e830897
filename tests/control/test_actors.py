"""Who asks is looked up where a command is decided, in the state in which it is decided."""

from __future__ import annotations

from tests.control.office import Office

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
from slicewise.control.entries import QuotaRecord, Role, TokenIssued, Want


def token(office: Office, **order: object) -> TokenIssued:
    status, view = office.ask(IssueToken(f"d{len(office.rows)}", **order))  # type: ignore[arg-type]
    assert status == 201, view
    return office.state.tokens[view["id"]]


def status(office: Office, caller: TokenIssued, origin: str = "") -> int:
    command = Create("acme", Terms(Want(profile="1g.10gb")))
    return office.desk.decide(command, bearer(caller, origin), office.now).status


def made() -> Office:
    office = Office()
    office.tenant()
    office.node(gpus=4)
    return office


def test_a_token_revoked_in_the_same_batch_decides_nothing() -> None:
    office = made()
    mine = token(office, role=Role.ADMIN)
    assert status(office, mine, "192.0.2.1") == 201
    (row,) = office.desk.take_rows()
    assert (row.actor, row.origin) == (mine.token, "192.0.2.1")
    office.desk.decide(RevokeToken(mine.token), internal("service"), office.now)
    assert status(office, mine) == 401
    assert len(office.desk.take_rows()) == 1, "that it was revoked"


def test_a_token_that_expires_decides_nothing() -> None:
    office = made()
    mine = token(office, role=Role.TENANT, tenant="acme", expires_in=10)
    office.now += 9
    assert status(office, mine) == 201
    office.now += 1
    assert status(office, mine) == 401


def test_a_namesake_of_a_tenant_has_other_tokens() -> None:
    office = made()
    mine = token(office, role=Role.TENANT, tenant="acme")
    assert office.ask(RemoveTenant("acme"))[0] == 200
    assert office.ask(SetTenant("acme", QuotaRecord(), new=True))[0] == 201
    assert status(office, mine) == 401


def test_no_part_of_the_service_can_be_impersonated_by_the_id_of_a_token() -> None:
    office = made()
    forged = TokenIssued("service", "digest", Role.ADMIN)
    assert status(office, forged) == 401
    mine = token(office, role=Role.OPERATOR)
    other = TokenIssued(mine.token, mine.digest, Role.ADMIN)
    assert status(office, other) == 401, "with more rights than it has"


def test_a_rotated_token_decides_until_the_overlap_is_over() -> None:
    office = made()
    old = token(office, role=Role.OPERATOR, note="robot")
    code, view = office.ask(RotateToken(old.token, "fresh", overlap=60))
    assert code == 201
    new = office.state.tokens[view["id"]]
    assert (new.role, new.note, new.replaces, new.expires) == (
        Role.OPERATOR, "robot", old.token, None,
    )  # fmt: skip
    assert status(office, old) == status(office, new) == 201
    office.now += 60
    assert (status(office, old), status(office, new)) == (401, 201)
    assert office.ask(RotateToken(new.token, "fresh", overlap=0))[0] == 409, "the same secret"
