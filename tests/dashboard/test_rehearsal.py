"""The table that places requests on the page, after a real rehearsal in its own process."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from tests.dashboard.browser import ARTEFACTS
from tests.dashboard.conftest import Visit, asked
from tests.dashboard.test_look import LOOKS, axe
from tests.e2e.server import Server

PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb")


@pytest.fixture(scope="module")
def rehearsed(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service that has rehearsed the demand of a tenant."""
    settings = ["policy=rehearsed", "rehearsal.share=1"]
    made = Server(tmp_path_factory.mktemp("rehearsed"), settings=settings)
    made.start()
    try:
        asked(made, "POST", "/v1/nodes", {"name": "n1", "model": "A100-80GB", "gpus": 8})
        asked(made, "POST", "/v1/tenants", {"name": "acme"})
        rng = random.Random(3)
        living: list[str] = []
        for _ in range(460):
            body = {"profile": rng.choice(PROFILES), "tenant": "acme", "lease_seconds": 60}
            status, answer = made.ask("POST", "/v1/allocations", body)
            if status == 201:
                living.append(answer["id"])
            if len(living) > 16:
                asked(made, "DELETE", f"/v1/allocations/{living.pop(rng.randrange(17))}")
        while asked(made, "GET", "/v1/policy")["rehearsal"] is None:
            time.sleep(0.2)
        yield made
    finally:
        made.kill()


@pytest.mark.parametrize("look", LOOKS)
def test_the_table_and_the_expected_rejections_are_shown(
    rehearsed: Server, visit: Visit, look: str
) -> None:
    visitor = visit(rehearsed, **LOOKS[look])
    page = visitor.sign_in(rehearsed.admin_token)
    visitor.go("overview")
    status = asked(rehearsed, "GET", "/v1/policy")
    card = page.locator("[data-policy]").locator("..")
    expect(card.locator("[data-policy]")).to_contain_text(status["table"])
    expect(card.locator("[data-policy]")).to_contain_text(status["why"])
    rows = card.locator("[data-candidate]")
    expect(rows).to_have_count(len(status["rehearsal"]["candidates"]))
    used = card.locator(f"[data-candidate='{status['table']}']")
    expect(used).to_contain_text("in use")
    expect(card).to_contain_text("asked for: ")
    card.scroll_into_view_if_needed()
    folder = ARTEFACTS / f"rehearsal-{look}"
    folder.mkdir(parents=True, exist_ok=True)
    card.screenshot(path=folder / "card.png")
    assert axe(page, "overview") == []
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= LOOKS[look]["viewport"]["width"]


def test_a_tenant_sees_the_table_without_the_demand_of_others(
    rehearsed: Server, visit: Visit
) -> None:
    body: dict[str, Any] = {"role": "tenant", "tenant": "acme"}
    secret = asked(rehearsed, "POST", "/v1/tokens", body)["token"]
    visitor = visit(rehearsed)
    page = visitor.sign_in(secret)
    visitor.go("overview")
    card = page.locator("[data-policy]").locator("..")
    status = asked(rehearsed, "GET", "/v1/policy")
    expect(card).to_contain_text(f"{status['table']}: {status['words']}")
    told = card.text_content() or ""
    assert "asked for" not in told
    assert "Rehearses" not in told
    expect(card.locator("[data-candidate]")).to_have_count(0)
