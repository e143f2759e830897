"""The file with sign-in rules: what it may contain, and which errors it reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slicewise.config.sign_in_rules import read_sign_in_rules
from slicewise.config.sources import read_settings
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


def documented(word: str) -> list[str]:
    """The TOML examples of the chapter on sign-in that contain a word."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    chapter = text[text.index("\n## Sign-in\n") : text.index("\n## Behind a proxy\n")]
    return [one for one in re.findall(r"```toml\n(.*?)```", chapter, re.DOTALL) if word in one]


def test_the_documented_rules_do_what_they_say(tmp_path: Path) -> None:
    tokens, certificates = documented("where =")
    people = Rules(read_sign_in_rules(file(tmp_path, tokens)).token)
    assert people.match({"sub": "1234567", "groups": ["gpu-admins"]}) is None
    assert people.match({"groups": ["gpu-admins"]}) == Match(Role.ADMIN, None, None)
    assert people.match({"groups": ["gpu-operators", "gpu-acme"]}) == Match(
        Role.OPERATOR, None, None
    )
    assert people.match({"groups": ["gpu-acme"]}) == Match(Role.TENANT, "acme", None)
    assert people.match({"groups": ["gpu-acme", "gpu-zen"]}) is None
    holders = Rules(read_sign_in_rules(file(tmp_path, certificates)).certificate)
    node = {"common_name": ["node-gpu-07"], "serial": "01"}
    assert holders.match(node) == Match(Role.AGENT, None, "gpu-07")
    assert holders.match({**node, "serial": "0f3a9c"}) is None
    assert holders.match({"uri": ["spiffe://example.org/ci"]}) == Match(Role.TENANT, "acme", None)


def test_the_documented_settings_are_accepted(tmp_path: Path) -> None:
    provider, certificates = documented("[sign_in]")
    settings = read_settings({}, {}, file(tmp_path, provider))
    assert settings.oidc_issuer == "https://login.example"
    assert settings.audience == ("slicewise",)
    assert settings.sign_in_rules == Path("/etc/slicewise/sign-in.toml")
    own = read_settings({}, {}, file(tmp_path, certificates))
    assert own.tls_client_ca == Path("/etc/slicewise/clients-ca.pem")
