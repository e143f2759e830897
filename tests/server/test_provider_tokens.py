"""Tokens of an OpenID Connect provider: which are accepted, with which rights, and for how long."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives import serialization
from tests.identity.provider import AUDIENCE, DISCOVERY, JWKS, Provider, encoded, new_key, public
from tests.server.harness import A100, Harness

from slicewise.server import provider_keys

RULES = """
[[token]]
where = { sub = "banned" }
role = "none"

[[token]]
where = { groups = "gpu-admins" }
role = "admin"

[[token]]
where = { groups = "tenant-*" }
role = "tenant"
tenant = "*"
"""
ONE = {"profile": "1g.10gb"}


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.stop()


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(RULES)
    return path


@pytest.fixture
def service(tmp_path: Path, provider: Provider, rules: Path) -> Iterator[Harness]:
    made = Harness(tmp_path, settings_for(provider, rules))
    made.post("/v1/nodes", A100)
    made.post("/v1/tenants", {"name": "acme"})
    yield made
    made.close()


@pytest.fixture
def unasked(
    tmp_path: Path, provider: Provider, rules: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Harness]:
    """A service that could not reach its provider so far, and refreshes as often as it is asked."""
    monkeypatch.setattr(provider_keys, "UNKNOWN_KEY_SECONDS", 0.0)
    provider.stop()
    made = Harness(tmp_path, settings_for(provider, rules))
    refresh(made)
    provider.start()
    yield made
    made.close()


def settings_for(provider: Provider, rules: Path) -> dict[str, Any]:
    return {
        "oidc_issuer": provider.issuer,
        "oidc_audience": ("other", AUDIENCE),
        "sign_in_rules": rules,
        "oidc_algorithms": ("RS256", "ES256", "ES384", "EdDSA"),
    }


def refresh(service: Harness) -> None:
    """Fetch the provider's keys; a fetch may have begun before the call."""
    keys = service.service.context.sign_in.keys
    assert keys is not None
    service.run(keys.refresh())
    service.run(keys.refresh())


def who(service: Harness, token: str) -> httpx.Response:
    return service.get("/v1/whoami", token=token)


def test_rights_follow_the_rules(service: Harness, provider: Provider) -> None:
    now = service.clock.now
    mine = provider.token(now, groups=["x", "tenant-acme"], email="a@b.example")
    found = who(service, mine).json()
    assert (found["id"], found["role"], found["tenant"]) == ("oidc:tenant:u-1", "tenant", "acme")
    assert found["note"] == "a@b.example"
    assert found["expires_at"] == "2023-11-14T23:13:20.000Z"
    made = service.post("/v1/allocations", ONE, token=mine)
    assert (made.status_code, made.json()["tenant"]) == (201, "acme")
    assert service.post("/v1/tenants", {"name": "x"}, token=mine).status_code == 403
    boss = provider.token(now, sub="boss", groups="gpu-admins")
    assert service.post("/v1/tenants", {"name": "x"}, token=boss).status_code == 201
    assert who(service, service.admin).json()["role"] == "admin"


def test_the_audit_log_names_the_subject(service: Harness, provider: Provider) -> None:
    mine = provider.token(service.clock.now, sub="jane", groups=["tenant-acme"])
    assert service.post("/v1/allocations", ONE, token=mine).status_code == 201
    (entry,) = service.get("/v1/audit?kind=allocated").json()["events"]
    assert (entry["actor"], entry["role"]) == ("oidc:tenant:jane", "tenant")
    boss = provider.token(service.clock.now, sub="boss", groups="gpu-admins")
    assert service.post("/v1/allocations", {**ONE, "tenant": "acme"}, token=boss).status_code == 201
    mine, theirs = service.get("/v1/audit?kind=allocated").json()["events"][::-1]
    assert (theirs["actor"], theirs["role"]) == ("oidc:admin:boss", "admin")
    assert mine["actor"] == "oidc:tenant:jane"


@pytest.mark.parametrize(
    ("claims", "problem"),
    [
        ({"groups": ["unheard"]}, "no rule"),
        ({}, "no rule"),
        ({"groups": ["tenant-nobody"]}, "does not exist"),
        ({"groups": ["tenant-"]}, "no rule"),
        ({"groups": ["tenant-acme", "tenant-default"]}, "no rule"),
        ({"groups": ["gpu-admins"], "sub": "banned"}, "no rule"),
        ({"groups": {"gpu-admins": True}}, "no rule"),
    ],
)
def test_claims_without_a_rule_have_no_rights(
    service: Harness, provider: Provider, claims: dict[str, Any], problem: str
) -> None:
    answer = who(service, provider.token(service.clock.now, **claims))
    assert answer.status_code == 403
    assert problem in answer.json()["detail"]


def unsigned(provider: Provider, now: float) -> str:
    _, body, _ = provider.token(now, groups="gpu-admins").split(".")
    head = encoded(json.dumps({"alg": "none", "kid": provider.kid}).encode()).decode()
    return f"{head}.{body}."


def symmetric(provider: Provider, now: float) -> str:
    """Signed with the public key as if it were a secret."""
    pem = provider.signing.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return provider.token(now, key=pem, algorithm="HS256", groups="gpu-admins")


FORGED: dict[str, Any] = {
    "no signature": unsigned,
    "a public key as a secret": symmetric,
    "a key of another": lambda p, now: p.token(now, key=new_key(), groups="gpu-admins"),
    "another curve": lambda p, now: p.token(
        now, key=new_key("ES384"), algorithm="ES384", groups="gpu-admins"
    ),
    "an algorithm that is not accepted": lambda p, now: p.token(
        now, key=new_key("RS512"), algorithm="RS512", groups="gpu-admins"
    ),
    "another issuer": lambda p, now: p.token(now, iss="https://evil.example", groups="gpu-admins"),
    "an issuer with a slash": lambda p, now: p.token(now, iss=p.issuer + "/", groups="gpu-admins"),
    "a list of issuers": lambda p, now: p.token(now, iss=[p.issuer], groups="gpu-admins"),
    "no issuer": lambda p, now: p.token(now, without=("iss",), groups="gpu-admins"),
    "another audience": lambda p, now: p.token(now, aud="mail", groups="gpu-admins"),
    "no audience": lambda p, now: p.token(now, without=("aud",), groups="gpu-admins"),
    "no expiry": lambda p, now: p.token(now, without=("exp",), groups="gpu-admins"),
    "an expiry that is no time": lambda p, now: p.token(now, exp=True, groups="gpu-admins"),
    "an endless expiry": lambda p, now: p.token(now, exp=1e999, groups="gpu-admins"),
    "an expiry of a thousand digits": lambda p, now: p.token(
        now, exp=10**1000, groups="gpu-admins"
    ),
    "no subject": lambda p, now: p.token(now, without=("sub",), groups="gpu-admins"),
    "an empty subject": lambda p, now: p.token(now, sub="", groups="gpu-admins"),
    "a subject of two lines": lambda p, now: p.token(now, sub="a\nb", groups="gpu-admins"),
    "a long subject": lambda p, now: p.token(now, sub="a" * 256, groups="gpu-admins"),
    "not valid before tomorrow": lambda p, now: p.token(now, nbf=now + 9e4, groups="gpu-admins"),
    "issued tomorrow": lambda p, now: p.token(now, iat=now + 9e4, groups="gpu-admins"),
    "a logout token": lambda p, now: p.token(now, head={"typ": "logout+jwt"}, groups="gpu-admins"),
    "a logout token without a type": lambda p, now: p.token(
        now, events={"http://schemas.openid.net/event/backchannel-logout": {}}, groups="gpu-admins"
    ),
    "a refresh token": lambda p, now: p.token(now, typ="Refresh", groups="gpu-admins"),
    "bound to a key": lambda p, now: p.token(now, cnf={"jkt": "x"}, groups="gpu-admins"),
    "critical extensions": lambda p, now: p.token(
        now, head={"crit": ["x"], "x": 1}, groups="gpu-admins"
    ),
    "a nested token": lambda p, now: p.token(now, head={"cty": "JWT"}, groups="gpu-admins"),
    "no key id": lambda p, now: p.token(now, head={"kid": None}, groups="gpu-admins"),
    "an unknown key id": lambda p, now: p.token(now, head={"kid": "other"}, groups="gpu-admins"),
    "an embedded key": lambda p, now: p.token(
        now, key=(own := new_key()), head={"jwk": public(own, kid="first")}, groups="gpu-admins"
    ),
    "an address of a key": lambda p, now: p.token(
        now, key=new_key(), head={"jku": f"{p.issuer}/evil"}, groups="gpu-admins"
    ),
    "not JSON": lambda p, now: "eyJhbGciOiJFUzI1NiIsImtpZCI6ImZpcnN0In0.e30x.AAAA",
    "three empty parts": lambda p, now: "..",
    "deeply nested": lambda p, now: base64.urlsafe_b64encode(b"[" * 6000).decode() + ".e30.AAAA",
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_forged_tokens_are_refused(service: Harness, provider: Provider, forged: Any) -> None:
    token = forged(provider, service.clock.now)
    answer = who(service, token)
    assert answer.status_code == 401, answer.text
    assert "/evil" not in provider.asked
    right = provider.token(service.clock.now, groups="gpu-admins")
    assert who(service, right).status_code == 200


@pytest.mark.parametrize("header", [{}, {"typ": "JWT"}, {"typ": "at+jwt"}])
@pytest.mark.parametrize("algorithm", ["RS256", "ES384", "EdDSA"])
def test_tokens_of_every_accepted_kind(
    service: Harness, provider: Provider, algorithm: str, header: dict[str, str]
) -> None:
    key = new_key(algorithm)
    provider.jwks.append(public(key, kid=algorithm))
    refresh(service)
    token = provider.token(
        service.clock.now, key=key, algorithm=algorithm, head={"kid": algorithm, **header},
        groups="gpu-admins", aud=["mail", AUDIENCE],
    )  # fmt: skip
    assert who(service, token).status_code == 200


@pytest.mark.parametrize(
    "jwk",
    [
        {"use": "enc"},
        {"key_ops": ["encrypt"]},
        {"alg": "ES384"},
        {"crv": "P-384"},
        {"kty": "oct", "k": "c2VjcmV0"},
        {"x": "AAAA"},
        {"kid": 7},
    ],
)
def test_keys_that_are_not_for_signatures_verify_nothing(
    service: Harness, provider: Provider, jwk: dict[str, Any]
) -> None:
    provider.jwks = [public(provider.signing, kid="first") | jwk]
    refresh(service)
    assert who(service, provider.token(service.clock.now, groups="gpu-admins")).status_code == 401


def test_a_short_rsa_key_verifies_nothing(service: Harness, provider: Provider) -> None:
    key = new_key("RS256", bits=1024)
    provider.jwks = [public(key, kid="short")]
    refresh(service)
    token = provider.token(
        service.clock.now, key=key, algorithm="RS256", head={"kid": "short"}, groups="gpu-admins"
    )
    assert who(service, token).status_code == 401


def test_a_token_ends_to_the_second(service: Harness, provider: Provider) -> None:
    mine = provider.token(service.clock.now, exp=service.clock.now + 10, groups="gpu-admins")
    service.clock.now += 9
    assert who(service, mine).status_code == 200
    service.clock.now += 1
    answer = who(service, mine)
    assert (answer.status_code, answer.json()["detail"]) == (401, "this token has expired")


def test_unknown_keys_cause_few_refreshes(
    service: Harness, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert who(service, provider.token(service.clock.now, groups="gpu-admins")).status_code == 200
    before = provider.asked[JWKS]
    for number in range(50):
        token = provider.token(service.clock.now, head={"kid": f"k{number}"})
        assert who(service, token).status_code == 401
    assert provider.asked[JWKS] <= before + 1
    monkeypatch.setattr(provider_keys, "UNKNOWN_KEY_SECONDS", 0.0)
    provider.rotate("second")
    assert who(service, provider.token(service.clock.now, groups="gpu-admins")).status_code == 200


def test_concurrent_requests_share_a_refresh(unasked: Harness, provider: Provider) -> None:
    service = unasked
    provider.delay = 0.2

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(service.service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sent = [
                client.get("/v1/whoami", headers={"authorization": f"Bearer {token}"})
                for token in [
                    *(provider.token(service.clock.now, head={"kid": f"k{n}"}) for n in range(20)),
                    provider.token(service.clock.now, groups="gpu-admins"),
                ]
            ]
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    assert service.run(ask()) == [401] * 20 + [200]
    assert provider.asked[JWKS] == 1, "one that succeeded"


def test_known_keys_and_own_tokens_go_on_without_the_provider(
    service: Harness, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = provider.token(service.clock.now, sub="a", groups="gpu-admins")
    assert who(service, first).status_code == 200
    second = provider.token(service.clock.now, sub="b", groups="gpu-admins")
    provider.rotate("second", keep=True)
    third = provider.token(service.clock.now, sub="c", groups="gpu-admins")
    provider.stop()
    monkeypatch.setattr(provider_keys, "UNKNOWN_KEY_SECONDS", 0.0)
    answer = who(service, third)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert [who(service, token).status_code for token in (first, second, service.admin)] == [
        200
    ] * 3
    (warning,) = service.get("/readyz").json()["warnings"]
    assert provider.issuer in warning
    provider.start()
    assert who(service, third).status_code == 200
    assert service.get("/readyz").json()["warnings"] == []


def test_a_key_that_the_provider_withdrew_is_trusted_no_longer(
    service: Harness, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = provider.token(service.clock.now, groups="gpu-admins")
    assert who(service, mine).status_code == 200
    provider.rotate("second")
    monkeypatch.setattr(provider_keys, "UNKNOWN_KEY_SECONDS", 0.0)
    new = provider.token(service.clock.now, groups="gpu-admins")
    assert who(service, new).status_code == 200
    answer = who(service, mine)
    assert answer.status_code == 401
    assert "no longer trusted" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "document", "problem"),
    [
        (DISCOVERY, {"issuer": "https://evil.example", "jwks_uri": "http://127.0.0.1/"}, "evil"),
        (DISCOVERY, b"<html>", "not JSON"),
        (DISCOVERY, [], "not a JSON object"),
        (DISCOVERY, {}, "issuer None"),
        (JWKS, {"keys": {}}, "list"),
        (JWKS, {"keys": [{}] * 101}, "list"),
        (JWKS, b"[" * 100_000, "not JSON"),
        (JWKS, b" " * (provider_keys.MAX_BYTES + 1), "larger"),
    ],
)
def test_wrong_documents_of_the_provider(
    unasked: Harness, provider: Provider, path: str, document: Any, problem: str
) -> None:
    service = unasked
    provider.documents[path] = document
    refresh(service)
    answer = who(service, provider.token(service.clock.now, groups="gpu-admins"))
    assert answer.status_code == 503
    (warning,) = service.get("/readyz").json()["warnings"]
    assert problem in warning


def test_keys_from_the_clear_network_are_not_fetched(unasked: Harness, provider: Provider) -> None:
    service = unasked
    provider.documents[DISCOVERY] = {"issuer": provider.issuer, "jwks_uri": "http://192.0.2.1/keys"}
    assert who(service, provider.token(service.clock.now)).status_code == 503
    assert "https" in service.get("/readyz").json()["warnings"][0]


def test_changed_rules_hold_at_once(service: Harness, provider: Provider, rules: Path) -> None:
    mine = provider.token(service.clock.now, groups=["tenant-acme"])
    assert who(service, mine).json()["role"] == "tenant"
    sign_in = service.service.context.sign_in
    rules.write_text('[[token]]\nwhere = { groups = "tenant-*" }\nrole = "read-only"\n')
    service.run(sign_in.reread(rules))
    assert who(service, mine).json()["role"] == "read-only"
    rules.write_text("[[token]]\nrole = 7")
    service.run(sign_in.reread(rules))
    assert who(service, mine).json()["role"] == "read-only"
    (warning,) = service.get("/readyz").json()["warnings"]
    assert "the earlier rules hold" in warning
    rules.write_text("")
    service.run(sign_in.reread(rules))
    assert who(service, mine).status_code == 403
    assert service.get("/readyz").json()["warnings"] == []


def test_failures_are_counted_by_reason(service: Harness, provider: Provider) -> None:
    now = service.clock.now
    who(service, provider.token(now, iss="https://evil.example"))
    who(service, provider.token(now))
    who(service, provider.token(now, exp=now - 1, groups="gpu-admins"))
    who(service, "sw_unknown")
    text = service.get("/metrics").text
    for reason in ("untrusted", "unmapped", "expired", "unknown"):
        assert f'slicewise_authentication_failures_total{{reason="{reason}"}} 1.0' in text


def test_keys_at_a_configured_address_need_no_discovery(
    tmp_path: Path, provider: Provider, rules: Path
) -> None:
    provider.documents = {DISCOVERY: (404, {}), "/own": {"keys": provider.jwks}}
    given = {**settings_for(provider, rules), "oidc_jwks": f"{provider.issuer}/own"}
    service = Harness(tmp_path, given)
    try:
        token = provider.token(service.clock.now, groups="gpu-admins")
        assert who(service, token).status_code == 200
        assert service.get("/v1/sign-in", token=None).json()["issuer"] is None, "no oidc.client"
        text = service.get("/metrics").text
        assert "slicewise_provider_keys 1.0" in text
        assert 'slicewise_provider_refreshes_total{result="ok"} 1.0' in text
    finally:
        service.close()


def test_the_identity_of_another_service_is_not_a_client(
    tmp_path: Path, provider: Provider, rules: Path
) -> None:
    given = {**settings_for(provider, rules), "oidc_client": "page", "oidc_audience": ()}
    service = Harness(tmp_path, given)
    try:
        now = service.clock.now
        assert who(service, provider.token(now, groups="gpu-admins")).status_code == 401
        token = provider.token(now, groups="gpu-admins", aud="page")
        assert who(service, token).status_code == 200
        offered = service.get("/v1/sign-in", token=None).json()
        assert (offered["issuer"], offered["client"]) == (provider.issuer, "page")
        body = {"code": "x", "verifier": "A" * 43, "redirect_uri": "http://page/sign-in"}
        provider.documents["/token"] = (400, {"error": "invalid_grant\n"})
        refused = service.post("/v1/sign-in/code", body, token=None)
        assert (refused.status_code, refused.json()["detail"]) == (
            400,
            "the identity provider refused the code: invalid_grant",
        )
        provider.stop()
        assert service.post("/v1/sign-in/code", body, token=None).status_code == 503
    finally:
        service.close()
