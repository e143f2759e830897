"""The handler checks the token of a command when it decides it."""

from __future__ import annotations

from tests.control.control_plane import ControlPlane

from slicewise.control.actors import bearer, identified, internal
from slicewise.control.commands import (
    Create,
    IssueToken,
    RemoveTenant,
    RevokeToken,
    RotateToken,
    SetTenant,
    Terms,
)
from slicewise.control.identities import Identity, Rule, Rules, role_of
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


def acme_rule() -> Rules:
    return Rules((Rule((("groups", "a"),), Role.TENANT, "acme"),))


def identity_status(control: ControlPlane, identity: Identity, caller: TokenIssued) -> int:
    command = Create("acme", Terms(Want(profile="1g.10gb")))
    return control.handler.decide(command, identified(caller, identity), control.now).status


def test_an_identity_is_checked_against_the_present_rules() -> None:
    control, rules = made(), acme_rule()
    jane = Identity("oidc", "jane", {"groups": ["a"]}, rules, control.now + 10)
    mine = jane.token(control.state, control.now)
    assert role_of(mine.token) is Role.TENANT
    assert identity_status(control, jane, mine) == 201
    assert control.handler.take_rows()[-1].actor == "oidc:tenant:jane"
    rules.current = (Rule((("groups", "a"),), Role.ADMIN),)
    assert identity_status(control, jane, mine) == 401, "more rights are other rights, too"
    rules.current = ()
    assert identity_status(control, jane, mine) == 403
    rules.current = acme_rule().current
    assert identity_status(control, jane, mine) == 201


def test_an_identity_ends_with_its_token_and_with_its_key() -> None:
    control, trusted = made(), [True]
    claims = {"groups": "a"}
    jane = Identity("oidc", "jane", claims, acme_rule(), control.now + 10, "", lambda: trusted[0])
    mine = jane.token(control.state, control.now)
    control.now += 9
    assert identity_status(control, jane, mine) == 201
    trusted[0] = False
    assert identity_status(control, jane, mine) == 401
    trusted[0] = True
    control.now += 1
    assert identity_status(control, jane, mine) == 401


def test_an_identity_of_a_removed_tenant_is_refused_for_the_next_of_its_name() -> None:
    control = made()
    jane = Identity("oidc", "jane", {"groups": "a"}, acme_rule(), control.now + 10)
    mine = jane.token(control.state, control.now)
    assert control.ask(RemoveTenant("acme"))[0] == 200
    assert identity_status(control, jane, mine) == 403
    assert control.ask(SetTenant("acme", QuotaRecord(), new=True))[0] == 201
    assert identity_status(control, jane, mine) == 401


def test_names_of_other_actors_have_no_role() -> None:
    for name in ("clock", "t-1", "oidc", "oidc:root:x", "other:admin:x", ""):
        assert role_of(name) is None
