"""Signing in to the dashboard with a real identity provider, in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.dashboard.browser import Visitor
from tests.e2e.hostile.test_identity import RULES
from tests.e2e.server import Server, free_port, wait_until
from tests.identity.dex_server import CLIENT, PASSWORD, Dex, mail, require_dex_or_skip

BUTTON = "Sign in with 127.0.0.1"


@pytest.fixture(scope="module")
def realm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Dex, Server]]:
    folder = tmp_path_factory.mktemp("realm")
    program = require_dex_or_skip()
    port = free_port()
    dex = Dex(folder, program, redirects=[f"http://127.0.0.1:{port}/sign-in"])
    dex.start()
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    server = Server(
        folder / "service",
        settings=[
            f"oidc.issuer={dex.issuer}",
            f"oidc.client={CLIENT}",
            f"sign_in.rules={rules}",
        ],
    )
    server.port = port
    server.start()
    assert server.ask("POST", "/v1/tenants", {"name": "acme"})[0] == 201
    wait_until(lambda: server.ask("GET", "/v1/sign-in")[1]["authorization_endpoint"])
    yield dex, server
    server.kill()
    dex.stop()


@pytest.fixture
def visitor(browser: Browser, realm: tuple[Dex, Server]) -> Iterator[Visitor]:
    made = Visitor(browser, realm[1])
    yield made
    made.close()


def go_to_provider(page: Page, name: str, password: str = PASSWORD) -> None:
    """Sign in at the provider."""
    page.get_by_role("button", name=BUTTON).click()
    page.get_by_placeholder("email address").fill(mail(name))
    page.get_by_placeholder("password").fill(password)
    page.get_by_role("button", name="Login").click()


def test_people_sign_in_and_return_to_their_page(visitor: Visitor) -> None:
    page = visitor.open("queue")
    go_to_provider(page, "jane")
    visitor.live()
    expect(page.get_by_role("heading", level=1)).to_have_text("Queue")
    expect(page.locator(".who .name")).to_have_text("acme · tenant")
    assert urlsplit(page.url).path == "/queue"
    assert "code" not in page.url
    page.reload()
    visitor.live()
    page.go_back()
    assert "code=" not in page.evaluate("location.href")


def test_people_without_a_rule_are_told_so(visitor: Visitor) -> None:
    page = visitor.open()
    go_to_provider(page, "eve")
    expect(page.get_by_role("alert")).to_contain_text("no rule gives it any rights")
    assert page.evaluate("sessionStorage.length") == 0


def caught(visitor: Visitor, name: str) -> tuple[str, dict[str, str]]:
    """The address to which the provider sends a person back, and the exchange that was stopped."""
    page = visitor.open()
    addresses: list[str] = []
    asked: list[dict[str, str]] = []

    def stop(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or "{}"))
        route.abort()

    page.on("request", lambda request: addresses.append(request.url))
    page.route("**/v1/sign-in/code", stop)
    go_to_provider(page, name)
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    page.unroute("**/v1/sign-in/code")
    (url,) = [one for one in addresses if "/sign-in?" in one]
    return url, asked[0]


def test_a_code_is_taken_by_the_tab_that_asked_for_it_and_once(
    visitor: Visitor, browser: Browser, realm: tuple[Dex, Server]
) -> None:
    url, _ = caught(visitor, "jane")
    assert len(parse_qs(urlsplit(url).query)["code"]) == 1
    # A person is lured to a page with the code of another.
    other = Visitor(browser, realm[1])
    for page in (other.page, visitor.page):
        page.goto(url)
        expect(page.get_by_role("alert")).to_contain_text("not begun in this tab")
        assert page.evaluate("sessionStorage.length") == 0
    other.close()


def test_a_replayed_or_stolen_code_gives_no_token(
    visitor: Visitor, realm: tuple[Dex, Server]
) -> None:
    server = realm[1].url

    def exchange(asked: dict[str, str]) -> httpx.Response:
        return httpx.post(f"{server}/v1/sign-in/code", json=asked)

    _, asked = caught(visitor, "jane")
    assert exchange({**asked, "verifier": "A" * 43}).status_code == 400, "a thief does not know it"
    _, asked = caught(visitor, "jane")
    first = exchange(asked)
    assert first.status_code == 200, first.text
    assert first.headers["cache-control"] == "no-store"
    replayed = exchange(asked)
    assert replayed.status_code == 400
    assert "token" not in replayed.json()


def test_without_a_provider_the_page_offers_tokens_only(browser: Browser, tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    alone = Visitor(browser, server)
    try:
        with alone.page.expect_response("**/v1/sign-in"):
            page = alone.open()
        expect(page.get_by_label("Token")).to_be_focused()
        assert page.get_by_role("button").count() == 1
        body = {"code": "x", "verifier": "A" * 43, "redirect_uri": server.url}
        assert server.ask("POST", "/v1/sign-in/code", body)[0] == 404
    finally:
        alone.close()
        server.kill()
