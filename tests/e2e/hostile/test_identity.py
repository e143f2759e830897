"""Identities of a real provider: what it issues has rights by rules, and nothing else has any.

Dex signs in real users. Forged tokens are made of its real ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from tests.e2e.hostile.halfway import Halfway
from tests.e2e.hostile.test_revoked import ONE, seq
from tests.e2e.server import Server, wait_until
from tests.identity.certificates import SERVER, Authority
from tests.identity.dex_server import CLIENT, OTHER_CLIENT, Dex, require_dex_or_skip
from tests.identity.provider import encoded, new_key, public, signed

RULES = """
[[token]]
where = { groups = "gpu-admins" }
role = "admin"

[[token]]
where = { groups = "gpu-operators" }
role = "operator"

[[token]]
where = { groups = "tenant-*" }
role = "tenant"
tenant = "*"
"""
SHORT_SECONDS = 10


class Realm:
    """A provider, and a service that trusts it."""

    def __init__(self, folder: Path, program: Path, token_seconds: int = 3600) -> None:
        dex_folder = folder / "dex"
        dex_folder.mkdir(parents=True)
        self.dex = Dex(dex_folder, program, token_seconds=token_seconds)
        self.dex.start()
        self.rules = folder / "rules.toml"
        self.rules.write_text(RULES)
        settings = [
            f"oidc.issuer={self.dex.issuer}",
            f"oidc.audience={CLIENT}-ci",
            f"sign_in.rules={self.rules}",
            "limits.strangers_per_second=1000000",
        ]
        self.server = Server(folder / "service", settings=settings)
        self.server.start()
        node = {"name": "n1", "model": "A100-80GB", "gpus": 50}
        for path, body in (("/v1/nodes", node), ("/v1/tenants", {"name": "acme"})):
            assert self.server.ask("POST", path, body)[0] == 201

    def who(self, token: str) -> tuple[int, dict[str, Any]]:
        """The answer to a request with this token."""
        return self.server.ask("GET", "/v1/whoami", token=token)

    def change_rules(self, text: str, token: str, status: int) -> None:
        """Write the rules, and wait until they have this effect on a token."""
        self.rules.write_text(text)
        wait_until(lambda: self.who(token)[0] == status)

    def close(self) -> None:
        """End both."""
        self.server.kill()
        self.dex.stop()


@pytest.fixture(scope="module")
def program() -> Path:
    return require_dex_or_skip()


@pytest.fixture(scope="module")
def shared(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Realm]:
    made = Realm(tmp_path_factory.mktemp("realm"), program)
    yield made
    made.close()


@pytest.fixture
def realm(shared: Realm) -> Realm:
    """The rules, and the provider, as they were at first."""
    shared.rules.write_text(RULES)
    token = shared.dex.token("jane")
    wait_until(lambda: shared.who(token)[1].get("role") == "tenant")
    return shared


def test_people_have_the_rights_of_their_groups(realm: Realm) -> None:
    found = {name: realm.who(realm.dex.token(name)) for name in ("jane", "omar", "root", "eve")}
    assert [status for status, _ in found.values()] == [200, 200, 200, 403]
    assert found["jane"][1]["tenant"] == "acme"
    assert [found[name][1]["role"] for name in ("omar", "root")] == ["operator", "admin"]
    assert found["jane"][1]["note"] == "jane@example.org"
    access = realm.dex.sign_in("jane")["access_token"]
    assert realm.who(access)[1]["tenant"] == "acme"


def test_what_an_identity_does_is_in_the_audit_log(realm: Realm) -> None:
    token = realm.dex.token("jane")
    status, made = realm.server.ask("POST", "/v1/allocations", ONE, token=token)
    assert (status, made["tenant"]) == (201, "acme")
    subject = jwt.decode(token, options={"verify_signature": False})["sub"]
    _, page = realm.server.ask("GET", f"/v1/audit?subject={made['id']}")
    assert {entry["actor"] for entry in page["events"]} == {f"oidc:tenant:{subject}"}
    assert subject in realm.server.log.read_text()


def forge(realm: Realm, head: dict[str, Any], claims: dict[str, Any], algorithm: str) -> str:
    """Dex's token of the admin with changes, signed by another key."""
    real = realm.dex.token("root")
    old = jwt.get_unverified_header(real)
    content = jwt.decode(real, options={"verify_signature": False})
    key = b"secret" * 8 if algorithm == "HS256" else new_key(algorithm)
    names = {name: value for name, value in {**old, **head}.items() if name != "alg"}
    return signed(names, {**content, **claims}, key, algorithm)


def test_a_token_of_another_key_algorithm_or_content_is_refused(realm: Realm) -> None:
    real = realm.dex.token("root")
    assert realm.who(real)[0] == 200
    head, body, proof = real.split(".")
    kid = jwt.get_unverified_header(real)["kid"]
    none = encoded(json.dumps({"alg": "none", "kid": kid}).encode()).decode()
    jane = realm.dex.token("jane").split(".")
    claims = jwt.decode(real, options={"verify_signature": False})
    longer = encoded(json.dumps({**claims, "exp": claims["exp"] + 3600}).encode()).decode()
    own = new_key("RS256")
    forged = {
        "signed by another key": forge(realm, {}, {}, "RS256"),
        "of another algorithm": forge(realm, {}, {}, "ES256"),
        "of an algorithm that is not accepted": forge(realm, {}, {}, "EdDSA"),
        "signed with a secret": forge(realm, {}, {}, "HS256"),
        "an unknown key": forge(realm, {"kid": "0" * 40}, {}, "RS256"),
        "a key of its own": signed({"kid": kid, "jwk": public(own)}, claims, own, "RS256"),
        "unsigned": f"{none}.{body}.",
        "without its signature": f"{head}.{body}.",
        "with a later expiry": f"{head}.{longer}.{proof}",
        "of two people": f"{head}.{body}.{jane[2]}",
        "in five parts": f"{real}.{body}.{proof}",
        "with a space": f"{head}. {body}.{proof}",
    }
    answers = {name: realm.who(token)[0] for name, token in forged.items()}
    assert set(answers.values()) == {401}, answers
    assert realm.who(real)[0] == 200


def test_a_token_for_another_client_is_refused(realm: Realm) -> None:
    status, problem = realm.who(realm.dex.token("root", OTHER_CLIENT))
    assert status == 401
    assert "another audience" in problem["detail"]


def test_a_token_of_another_provider_is_refused(
    realm: Realm, program: Path, tmp_path: Path
) -> None:
    other = Dex(tmp_path, program)
    other.start()
    try:
        # Dex names its keys by chance, so this one is unknown; the issuer is wrong in any case.
        assert realm.who(other.token("root"))[0] == 401
    finally:
        other.stop()


WRITES = [
    ("root", "POST", "/v1/tenants", {"name": "late"}),
    ("root", "POST", "/v1/tokens", {"role": "admin"}),
    ("omar", "POST", "/v1/nodes", {"name": "late", "model": "A30-24GB", "gpus": 1}),
    ("jane", "POST", "/v1/allocations", ONE),
    ("jane", "POST", "/v1/allocations/batch", {"allocations": [ONE]}),
]


@pytest.mark.parametrize(("name", "method", "path", "body"), WRITES)
def test_nothing_is_written_after_the_rules_have_changed(
    realm: Realm, name: str, method: str, path: str, body: object
) -> None:
    token = realm.dex.token(name)
    request = Halfway(realm.server, method, path, token, body)
    subject = jwt.decode(token, options={"verify_signature": False})["sub"]
    realm.change_rules(
        f'[[token]]\nwhere = {{ sub = "{subject}" }}\nrole = "none"\n{RULES}', token, 403
    )
    before = seq(realm.server)
    assert request.finish()[0] in (401, 403)
    assert seq(realm.server) == before


def test_more_rights_do_not_reach_a_request_that_has_begun(realm: Realm) -> None:
    token = realm.dex.token("jane")
    request = Halfway(realm.server, "POST", "/v1/allocations", token, ONE)
    realm.rules.write_text('[[token]]\nwhere = { groups = "tenant-acme" }\nrole = "admin"\n')
    wait_until(lambda: realm.who(token)[1].get("role") == "admin")
    before = seq(realm.server)
    assert request.finish()[0] == 401
    assert seq(realm.server) == before


def test_a_removed_tenant_locks_out_its_members(realm: Realm) -> None:
    server = realm.server
    realm.rules.write_text(
        '[[token]]\nwhere = { groups = "tenant-acme" }\nrole = "tenant"\ntenant = "brief"\n'
    )
    assert server.ask("POST", "/v1/tenants", {"name": "brief"})[0] == 201
    token = realm.dex.token("jane")
    wait_until(lambda: realm.who(token)[1].get("tenant") == "brief")
    request = Halfway(server, "POST", "/v1/allocations", token, ONE)
    assert server.ask("DELETE", "/v1/tenants/brief")[0] == 200
    assert realm.who(token)[0] == 403
    assert server.ask("POST", "/v1/tenants", {"name": "brief"})[0] == 201
    assert request.finish()[0] == 401, "another tenant of the same name"
    assert realm.who(token)[0] == 200
    assert server.ask("DELETE", "/v1/tenants/brief")[0] == 200


def test_an_event_stream_ends_when_the_rules_change(realm: Realm) -> None:
    token = realm.dex.token("jane")
    stream = Halfway(realm.server, "GET", "/v1/events", token, patience=60)
    realm.change_rules("", token, 403)
    status, _, _ = stream.read()
    assert status == 200, "it had begun, and has ended"


def test_a_restarted_provider_is_trusted_with_its_new_keys_only(
    program: Path, tmp_path: Path
) -> None:
    realm = Realm(tmp_path, program)
    try:
        old = realm.dex.token("root")
        assert realm.who(old)[0] == 200
        realm.dex.stop()
        own = realm.server.admin_token
        assert [realm.who(token)[0] for token in (old, own)] == [200, 200]
        realm.dex.algorithm = "ES256"
        realm.dex.start()
        new = realm.dex.token("root")
        assert jwt.get_unverified_header(new)["alg"] == "ES256"
        wait_until(lambda: realm.who(new)[0] == 200)
        status, problem = realm.who(old)
        assert status == 401
        assert "no longer trusted" in problem["detail"]
        assert realm.who(own)[0] == 200
    finally:
        realm.close()


def test_a_service_that_never_reached_its_provider_serves_its_own_tokens(
    program: Path, tmp_path: Path
) -> None:
    realm = Realm(tmp_path, program)
    try:
        token = realm.dex.token("root")
        realm.server.stop()
        realm.dex.stop()
        realm.server.start()
        status, problem = realm.who(token)
        assert status == 503, problem
        assert realm.who(realm.server.admin_token)[0] == 200
        readiness = realm.server.readiness()
        assert readiness is not None
        assert realm.dex.issuer in readiness["warnings"][0]
    finally:
        realm.close()


def test_the_certificate_of_the_provider_is_checked(program: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    dex = Dex(tmp_path, program, certificate=authority.issue("dex", usage=SERVER))
    dex.start()
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES)
    settings = [
        f"oidc.issuer={dex.issuer}",
        f"oidc.audience={CLIENT}-ci",
        f"sign_in.rules={rules}",
    ]
    server = Server(tmp_path / "service", settings=settings)
    try:
        server.start()
        status, problem = server.ask("GET", "/v1/whoami", token=dex.token("root"))
        assert status == 503, problem
        readiness = server.readiness()
        assert readiness is not None
        assert "certificate" in readiness["warnings"][0].lower()
        server.stop()
        server.settings = [*settings, f"oidc.ca={authority.file}"]
        server.start()
        wait_until(lambda: server.ask("GET", "/v1/whoami", token=dex.token("root"))[0] == 200)
    finally:
        server.kill()
        dex.stop()


def test_requests_streams_and_polls_end_with_their_token(program: Path, tmp_path: Path) -> None:
    realm = Realm(tmp_path, program, SHORT_SECONDS)
    try:
        token = realm.dex.token("jane")
        begun = jwt.decode(token, options={"verify_signature": False})
        request = Halfway(realm.server, "POST", "/v1/allocations", token, ONE)
        stream = Halfway(realm.server, "GET", "/v1/events", token, patience=60)
        before = seq(realm.server)
        wait_until(lambda: realm.who(token)[0] == 401)
        assert time.time() >= begun["exp"]
        status, _, problem = request.finish()
        assert (status, problem["detail"]) == (401, "this token has expired")
        assert seq(realm.server) == before
        assert stream.read()[0] == 200
    finally:
        realm.close()
