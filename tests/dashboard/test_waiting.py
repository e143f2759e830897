"""Waiting on the page: the queue by line, reserved windows on the map, shares of tenants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.dashboard.browser import ARTEFACTS
from tests.dashboard.conftest import Visit, asked
from tests.dashboard.test_look import LOOKS, axe
from tests.e2e.server import Server


@pytest.fixture(scope="module")
def contested(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Tenant zen holds most of two GPUs; acme waits for a whole one, which is reserved for it."""
    made = Server(tmp_path_factory.mktemp("contested"), settings=["queue.reserve_after=0"])
    made.start()
    try:
        asked(made, "POST", "/v1/nodes", {"name": "n1", "model": "A100-80GB", "gpus": 2})
        asked(made, "POST", "/v1/tenants", {"name": "acme", "quota": {"guarantee": 4}})
        asked(made, "POST", "/v1/tenants", {"name": "zen", "quota": {"weight": 3}})

        def ask(tenant: str, profile: str, **terms: Any) -> Any:
            body = {"tenant": tenant, "profile": profile, **terms}
            return asked(made, "POST", "/v1/allocations", body)

        for profile in ("3g.40gb", "3g.40gb", "4g.40gb"):
            ask("zen", profile, lease_seconds=7200)
        assert ask("acme", "7g.80gb", wait_seconds=7200)["state"] == "queued"
        ask("zen", "1g.10gb", lease_seconds=600)  # it overtakes
        for _ in range(2):
            assert ask("zen", "3g.40gb", wait_seconds=7200)["state"] == "queued"
        (line, _) = asked(made, "GET", "/v1/queue")["lines"]
        assert len(line["reserved"]) == 1
        yield made
    finally:
        made.kill()


def reserved_gpu(server: Server) -> Any:
    devices = asked(server, "GET", "/v1/cluster?gpus=true")["devices"]
    (found,) = [one for one in devices if one["reserved"]]
    return found


def choose(page: Page, gpu: int) -> Locator:
    """Choose a GPU of the first node on the map; returns its details."""
    page.get_by_role("application").focus()
    page.keyboard.press("Home")
    for _ in range(gpu):
        page.keyboard.press("ArrowRight")
    return page.get_by_label("The chosen GPU")


@pytest.mark.parametrize("look", LOOKS)
def test_lines_shares_and_reservations_are_shown(
    contested: Server, visit: Visit, look: str
) -> None:
    folder = ARTEFACTS / f"waiting-{look}"
    folder.mkdir(parents=True, exist_ok=True)
    visitor = visit(contested, **LOOKS[look])
    page = visitor.sign_in(contested.admin_token)
    gpu = reserved_gpu(contested)
    expect(page.get_by_label("Legend")).to_contain_text("reserved")
    expect(choose(page, gpu["gpu"])).to_contain_text("reserved for acme: 7g.80gb, from")
    page.screenshot(path=folder / "cluster.png")
    problems = axe(page, "cluster")
    visitor.go("queue")
    rows = page.get_by_role("table", name="Lines, in the order").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("acme")
    expect(rows.nth(0)).to_contain_text("7g.80gb")
    expect(rows.nth(0)).to_contain_text("own reservation")
    expect(rows.nth(0)).to_contain_text("by ")
    expect(rows.nth(1)).to_contain_text("zen")
    expect(rows.nth(1).locator("td[data-name=Requests]")).to_have_text("2")
    expect(rows.nth(1)).to_contain_text("not known")
    requests = page.get_by_role("table", name="Single requests").locator("tbody tr")
    expect(requests).to_have_count(3)
    page.screenshot(path=folder / "queue.png", full_page=True)
    problems += axe(page, "queue")
    visitor.go("tenants")
    cell = page.locator("tr[data-key=zen] td[data-name=Share]")
    expect(cell).to_contain_text("60% by weight 3")  # weights 1, 1 and 3
    expect(cell.locator(".fair")).to_have_count(1)
    expect(cell.locator(".guarantee")).to_have_count(0)
    other = page.locator("tr[data-key=acme] td[data-name=Share]")
    expect(other).to_contain_text("25% guaranteed")
    expect(other).to_contain_text("20% by weight 1")
    expect(other.locator(".guarantee")).to_have_count(1)
    page.screenshot(path=folder / "tenants.png")
    problems += axe(page, "tenants")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= LOOKS[look]["viewport"]["width"]
    assert problems == []


def test_another_tenant_sees_that_a_window_is_reserved(contested: Server, visit: Visit) -> None:
    token = asked(contested, "POST", "/v1/tokens", {"role": "tenant", "tenant": "zen"})["token"]
    visitor = visit(contested)
    page = visitor.sign_in(token)
    details = choose(page, reserved_gpu(contested)["gpu"])
    expect(details).to_contain_text("reserved for another tenant")
    visitor.go("queue")
    lines = page.get_by_role("table", name="Lines, in the order").locator("tbody tr")
    expect(lines).to_have_count(1)
    visitor.go("tenants")
    expect(page.locator("tr[data-key=zen] td[data-name=Share]")).to_contain_text("weight 3")
    assert "acme" not in page.content()


def test_a_reservation_disappears_with_its_holder(contested: Server, visit: Visit) -> None:
    gpu = reserved_gpu(contested)["gpu"]
    visitor = visit(contested)
    page = visitor.sign_in(contested.admin_token)
    details = choose(page, gpu)
    expect(details).to_contain_text("reserved for acme")
    page.get_by_label("Room", exact=True).select_option("reserved")
    expect(page.locator("#map-count")).to_have_text("1 of 2 GPUs shown")
    first = asked(contested, "GET", "/v1/queue")["lines"][0]["first"]
    asked(contested, "DELETE", f"/v1/allocations/{first}")
    expect(page.locator(".stage")).to_contain_text("No GPU fits these filters")
    page.get_by_label("Room", exact=True).select_option("")
    expect(details).not_to_contain_text("reserved")
