"""`slicewise login`: the device flow at a real provider, and the file with the tokens."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx
import pytest
from tests.e2e.hostile.test_identity import RULES
from tests.e2e.server import PATIENCE_SECONDS, Server, wait_until
from tests.identity.dex_server import CLIENT, PASSWORD, Dex, mail, require_dex_or_skip
from tests.identity.provider import DISCOVERY, Provider

from slicewise.cli.login import _device_flow
from slicewise.cli.logins import Login, expiry, keep, kept_token
from slicewise.core.errors import SlicewiseError


@pytest.fixture(scope="module")
def realm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("realm")
    dex = Dex(folder, require_dex_or_skip())
    dex.start()
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    settings = [
        f"oidc.issuer={dex.issuer}",
        f"oidc.client={CLIENT}",
        f"sign_in.rules={rules}",
    ]
    server = Server(folder / "service", settings=settings)
    server.start()
    assert server.ask("POST", "/v1/tenants", {"name": "acme"})[0] == 201
    wait_until(lambda: server.ask("GET", "/v1/sign-in")[1]["token_endpoint"])
    yield server
    server.kill()
    dex.stop()


def environment(home: Path, server: str) -> dict[str, str]:
    own = {name: one for name, one in os.environ.items() if not name.startswith("SLICEWISE_")}
    return own | {"XDG_CONFIG_HOME": str(home), "SLICEWISE_SERVER": server}


def command(home: Path, server: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command with its own home."""
    return subprocess.run(
        [sys.executable, "-m", "slicewise.cli", *arguments],
        env=environment(home, server),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )


def sign_in(address: str, name: str) -> str:
    """What a person does in the browser; returns the last page."""
    with httpx.Client(follow_redirects=True, timeout=PATIENCE_SECONDS) as browser:
        page = browser.get(address)
        (code,) = parse_qs(urlsplit(address).query)["user_code"]
        page = browser.post(form(page), data={"user_code": code})
        page = browser.post(form(page), data={"login": mail(name), "password": PASSWORD})
        return page.text


def form(page: httpx.Response) -> str:
    """The address to which the form of a page is sent; Dex leaves it out for the page itself."""
    found = re.search(r'<form[^>]*action="([^"]*)"', page.text)
    return urljoin(str(page.url), unescape(found[1])) if found else str(page.url)


def login(home: Path, server: str, name: str) -> tuple[int, str, str]:
    """Run the command, and sign in at the address it shows."""
    process = subprocess.Popen(
        [sys.executable, "-m", "slicewise.cli", "login"],
        env=environment(home, server),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("Open http://127.0.0.1:"), line
        sign_in(line.split()[1], name)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def test_later_commands_use_the_sign_in(realm: Server, tmp_path: Path) -> None:
    assert "no token" in command(tmp_path, realm.url, "ls").stderr
    status, out, err = login(tmp_path, realm.url, "jane")
    assert status == 0, err
    assert out.startswith(f"signed in to {realm.url} as jane@example.org, tenant of acme, until ")
    kept = tmp_path / "slicewise" / "logins.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert command(tmp_path, realm.url, "ls").returncode == 0
    elsewhere = realm.url.replace("127.0.0.1", "localhost")
    assert "no token" in command(tmp_path, elsewhere, "ls").stderr, "it is for that server only"
    assert command(tmp_path, realm.url, "logout").stdout == f"{realm.url}: signed out\n"
    assert "no token" in command(tmp_path, realm.url, "ls").stderr
    assert "there was no sign-in" in command(tmp_path, realm.url, "logout").stdout


def test_a_person_without_rights_is_not_signed_in(realm: Server, tmp_path: Path) -> None:
    status, _, err = login(tmp_path, realm.url, "eve")
    assert status == 2
    assert "no rule gives it any rights" in err
    assert "no token" in command(tmp_path, realm.url, "ls").stderr


def test_a_service_without_a_provider(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        done = command(tmp_path, server.url, "login")
        assert done.returncode == 2
        assert "has no identity provider (oidc.client): use a token" in done.stderr
    finally:
        server.kill()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "slicewise" / "logins.json"


def sign_in_of(
    token: str,
    expires: float | None = None,
    refresh: str | None = None,
    endpoint: str = "https://login.example/token",
) -> Login:
    return {
        "token": token,
        "expires_at": expires,
        "refresh_token": refresh,
        "endpoint": endpoint,
        "client": "slicewise",
    }


def test_the_file_of_sign_ins(home: Path) -> None:
    assert kept_token("http://a") is None
    assert not keep("http://a/", sign_in_of("one", time.time() + 3600))
    keep("http://a,http://b", sign_in_of("two"))
    assert (kept_token("http://a"), kept_token("http://b, http://a/")) == ("one", "two")
    assert kept_token("http://b") is None
    keep("http://a", sign_in_of("soon", time.time() + 20))
    assert kept_token("http://a") == "soon", "there is no way to refresh it"
    keep("http://a", sign_in_of("old", 1.0))
    with pytest.raises(SlicewiseError, match="your sign-in has expired"):
        kept_token("http://a")
    home.write_text("[]")
    with pytest.raises(SlicewiseError, match="not a file of slicewise login"):
        kept_token("http://a")


def test_an_expired_token_is_replaced(home: Path) -> None:
    provider = Provider()
    try:
        old = sign_in_of("old", 1.0, "once", f"{provider.issuer}/token")
        keep("http://a", old)
        new = provider.token()
        provider.documents = {"/token": {"id_token": new, "refresh_token": "twice"}}
        assert kept_token("http://a") == new
        assert kept_token("http://a") == new
        assert provider.asked["/token"] == 1
        (kept,) = json.loads(home.read_text())["services"].values()
        assert kept["refresh_token"] == "twice"
        assert kept["expires_at"] > time.time()
        keep("http://a", old)
        provider.documents = {"/token": (400, {"error": "invalid_grant"})}
        with pytest.raises(SlicewiseError, match="your sign-in has expired"):
            kept_token("http://a")
    finally:
        provider.stop()


def test_the_expiry_in_a_token() -> None:
    provider = Provider()
    provider.stop()
    assert expiry(provider.token(1000.0)) == 4600.0
    for text in ("", "a.b", "a.e30.c", "a.bnVsbA.c", "sw_x"):
        assert expiry(text) is None


def device(provider: Provider, **answers: object) -> dict[str, object]:
    """A provider with these answers, as its service offers it."""
    begun = {
        "device_code": "d", "user_code": "A\x1b[2J", "verification_uri": "https://login.example",
        "interval": 0.01, "expires_in": 600,
    }  # fmt: skip
    provider.documents = {"/device": begun, "/token": {"error": "access_denied"}, **answers}
    return {
        "issuer": provider.issuer,
        "client": "slicewise",
        "scopes": ["openid"],
        "device_authorization_endpoint": f"{provider.issuer}/device",
        "token_endpoint": f"{provider.issuer}/token",
    }


def test_refusals_and_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    provider = Provider()
    try:
        with pytest.raises(SlicewiseError, match="not signed in: access_denied"):
            _device_flow(device(provider, **{"/token": (400, {"error": "access_denied"})}))
        assert "\x1b" not in capsys.readouterr().err
        with pytest.raises(SlicewiseError, match="no identity token"):
            _device_flow(device(provider, **{"/token": {"access_token": "x"}}))
        with pytest.raises(SlicewiseError, match="no JSON object"):
            _device_flow(device(provider, **{"/device": b"<html>"}))
        with pytest.raises(SlicewiseError, match="invalid_client"):
            _device_flow(device(provider, **{"/device": (401, {"error": "invalid_client"})}))
        with pytest.raises(SlicewiseError, match="does not offer the device flow"):
            _device_flow({**device(provider), "device_authorization_endpoint": None})
        clear = {**device(provider), "token_endpoint": "http://192.0.2.1/token"}
        with pytest.raises(SlicewiseError, match="in the clear"):
            _device_flow(clear)
        assert DISCOVERY not in provider.asked
    finally:
        provider.stop()


def test_the_file_holds_the_token_as_text(home: Path) -> None:
    keep("https://s", sign_in_of("t"))
    assert json.loads(home.read_text())["services"]["https://s"]["token"] == "t"
