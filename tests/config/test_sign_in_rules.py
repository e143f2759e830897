"""The file with sign-in rules: what it may contain, and which errors it reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from slicewise.config.sign_in_rules import read_sign_in_rules
from slicewise.control.identities import Match, Rules
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Role


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return path


def test_rules_for_tokens_and_certificates(tmp_path: Path) -> None:
    text = """
[[token]]
where = { "realm_access.roles" = "ops", email_verified = true }
role = "operator"

[[token]]
where = { email = "*@acme.example" }
role = "read-only"
tenant = "acme"

[[certificate]]
where = { common_name = "node-*" }
role = "agent"
node = "*"
"""
    rules = read_sign_in_rules(file(tmp_path, text))
    token, certificate = Rules(rules.token), Rules(rules.certificate)
    staff = {"realm_access": {"roles": ["x", "ops"]}, "email_verified": True}
    assert token.match(staff) == Match(Role.OPERATOR, None, None)
    assert token.match({**staff, "email_verified": "true"}) is None
    assert token.match({**staff, "email_verified": 1}) is None
    assert token.match({"realm_access": ["ops"], "email_verified": True}) is None
    assert token.match({"realm_access.roles": "ops", "email_verified": True}) is not None
    assert token.match({"email": "a@acme.example"}) == Match(Role.READ_ONLY, "acme", None)
    assert token.match({"email": "a@acme.example", "email_verified": False}) is None
    assert token.match({"email": "a@acme.example.evil.example"}) is None
    assert token.match({"email": "@acme.example"}) is None
    assert certificate.match({"common_name": ["node-7"]}) == Match(Role.AGENT, None, "7")
    assert certificate.match({"common_name": ["other"]}) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x", "not TOML"),
        ("[[tokens]]", "tokens"),
        ('[[token]]\nrole = "admin"', "where"),
        ('[[token]]\nwhere = {}\nrole = "admin"', "every caller would match"),
        ('[[token]]\nwhere = { a = [] }\nrole = "admin"', "where"),
        ('[[token]]\nwhere = { a = "" }\nrole = "admin"', "must not be empty"),
        ('[[token]]\nwhere = { a = "x*y*" }\nrole = "admin"', "one *"),
        ('[[token]]\nwhere = { a = "x*", b = "*" }\nrole = "admin"', "only one value"),
        ('[[token]]\nwhere = { a = "b" }\nrole = "root"', "token rule 1: role must be one of"),
        ('[[token]]\nwhere = { a = "b" }\nrole = "tenant"', "needs the name of the tenant"),
        ('[[token]]\nwhere = { a = "b" }\nrole = "tenant"\ntenant = "*"', "no value in where"),
        ('[[token]]\nwhere = { a = "b" }\nrole = "admin"\ntenant = "t"', "belongs to no tenant"),
        ('[[token]]\nwhere = { a = "b" }\nrole = "agent"', "needs the name of the node"),
        ('[[token]]\nwhere = { a = "b" }\nrole = "admin"\nnode = "n"', "belongs to no node"),
        ('[[token]]\nwhere = { a = "b" }\nrole = "admin"\nrights = 1', "rights"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(SlicewiseError) as error:
        read_sign_in_rules(file(tmp_path, text))
    assert problem in str(error.value)
    assert "rules.toml" in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SlicewiseError, match="cannot be read"):
        read_sign_in_rules(tmp_path / "nowhere.toml")


def test_a_file_of_any_size(tmp_path: Path) -> None:
    with pytest.raises(SlicewiseError, match="larger than"):
        read_sign_in_rules(file(tmp_path, "#" * (1 << 20) + "\n"))
