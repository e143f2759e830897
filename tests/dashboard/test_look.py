"""The appearance of the dashboard: every page, axe, phones, 10,000 GPUs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]
from playwright.sync_api import Page, expect
from tests.dashboard.browser import ARTEFACTS, PAGES, PHONE, WIDE
from tests.dashboard.conftest import Tell, Visit, asked
from tests.e2e.server import Server

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": WIDE},
    "dark": {"color_scheme": "dark", "viewport": WIDE},
    "phone": {"color_scheme": "light", "viewport": PHONE, "is_mobile": True, "has_touch": True},
}
FRAMES = """
async (pixels) => {
  const view = document.querySelector(".map");
  const times = [];
  let before = await new Promise(requestAnimationFrame);
  for (let frame = 0; frame < 120; frame += 1) {
    view.scrollTop += pixels;
    const now = await new Promise(requestAnimationFrame);
    times.push(now - before);
    before = now;
  }
  return times.sort((one, other) => one - other);
}
"""
PAINTS = """
async () => {
  const home = document.querySelector("script").src.replace("main.js", "");
  const { ClusterMap } = await import(`${home}pages/cluster_map.js`);
  const paint = ClusterMap.prototype.paint;
  const times = [];
  ClusterMap.prototype.paint = function () {
    const begun = performance.now();
    paint.call(this);
    times.push(performance.now() - begun);
  };
  window.paints = times;
}
"""


@pytest.fixture(scope="module")
def busy(server: Server) -> Server:
    """A cluster in use: instances, gaps, rejections, a waiting request."""
    for name, model, gpus in (
        ("dgx-01", "A100-80GB", 8),
        ("dgx-02", "A100-80GB", 8),
        ("hgx-01", "H100-80GB-SXM5", 8),
    ):
        asked(server, "POST", "/v1/nodes", {"name": name, "model": model, "gpus": gpus})
    asked(server, "PATCH", "/v1/tenants/acme", {"quota": {"memory_slices": 120, "instances": 60}})
    asked(server, "POST", "/v1/tenants", {"name": "research", "quota": {"max_priority": 10}})
    rng = random.Random(7)
    profiles = (
        ["1g.10gb"] * 4 + ["2g.20gb"] * 3 + ["3g.40gb"] * 2 + ["4g.40gb", "7g.80gb", "1g.6gb"]
    )
    living: list[str] = []
    for number in range(160):
        body = {
            "profile": rng.choice(profiles),
            "tenant": rng.choice(["acme", "zen", "research"]),
            "labels": {"job": f"run-{number}"},
        }
        status, answer = server.ask("POST", "/v1/allocations", body)
        if status == 201:
            living.append(answer["id"])
        while len(living) > 62:
            asked(server, "DELETE", f"/v1/allocations/{living.pop(rng.randrange(len(living)))}")
    for profile, count in (("7g.80gb", 8), ("4g.40gb", 1), ("3g.40gb", 2)):
        wanted = {"profile": profile, "count": count, "tenant": "zen"}
        server.ask("POST", "/v1/allocations", wanted)
        server.ask("POST", "/v1/allocations", wanted | {"wait_seconds": 3600, "priority": count})
    asked(server, "POST", "/v1/nodes/hgx-01/cordon")
    return server


def settle(page: Page, place: str) -> None:
    """Wait until a page is complete."""
    expect(page.get_by_role("heading", level=1)).to_have_text(PAGES[place])
    expect(page.locator(".stand-in.loading")).to_have_count(0)
    inside = {
        "cluster": ".map canvas",
        "overview": ".chart svg",
        "compare": ".comparison canvas",
        "ask": "#verdict",
        "defrag": ".moves, .stand-in:not(.loading)",
    }.get(place, "tbody tr")
    expect(page.locator(inside).first).to_be_visible()


def play(page: Page, to: int = 150) -> None:
    """Let a comparison run for a while."""
    page.get_by_label("Speed").select_option("600")
    page.get_by_label("Requests").select_option("200")
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#compare-place")).to_have_text("200 of 200")
    page.get_by_label("Request", exact=True).fill(str(to))
    expect(page.locator("#compare-place")).to_have_text(f"{to} of 200")


@pytest.mark.parametrize("look", LOOKS)
def test_every_page_renders_without_accessibility_findings(
    busy: Server, visit: Visit, look: str
) -> None:
    folder = ARTEFACTS / look
    folder.mkdir(parents=True, exist_ok=True)
    visitor = visit(**LOOKS[look])
    visitor.open()
    page = visitor.page
    problems = axe(page, "login")
    page.screenshot(path=folder / "login.png")
    visitor.sign_in(busy.admin_token)
    for place in PAGES:
        if place == "defrag":
            visitor.open("defrag?profile=7g.80gb")
            visitor.live()
        else:
            visitor.go(place)
        settle(page, place)
        if place == "compare":
            play(page)
        if place == "ask":
            page.get_by_label("Profile", exact=True).select_option("2g.20gb")
            expect(page.locator("#verdict")).to_contain_text("2g.20gb")
        if place == "cluster":
            page.get_by_role("application").focus()
            page.keyboard.press("ArrowRight")
        expect(page.locator(".notice")).to_have_count(0)
        page.screenshot(path=folder / f"{place}.png")
        problems += axe(page, place)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= LOOKS[look]["viewport"]["width"], f"{place} is {width} wide"
    assert problems == []


def axe(page: Page, where: str) -> list[str]:
    """The serious and critical findings of axe-core on a page."""
    # The content security policy allows only the page's own scripts; the tests bypass it.
    found = Axe().run(page).response["violations"]
    return [
        f"{where}: {one['id']}: {one['help']}: {[node['target'] for node in one['nodes']][:3]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def test_empty_pages_have_a_message(visit: Visit, tmp_path_factory: pytest.TempPathFactory) -> None:
    server = Server(tmp_path_factory.mktemp("empty"))
    server.start()
    try:
        visitor = visit(server)
        page = visitor.sign_in(server.admin_token)
        folder = ARTEFACTS / "states"
        folder.mkdir(parents=True, exist_ok=True)
        expect(page.get_by_text("No nodes yet")).to_be_visible()
        page.screenshot(path=folder / "empty-cluster.png")
        for place, words in (
            ("queue", "The queue is empty"),
            ("allocations", "No allocations here"),
            ("ask", "No nodes yet"),
            ("defrag", "There is no room to be won back"),
        ):
            visitor.go(place)
            expect(page.get_by_text(words)).to_be_visible()
            page.screenshot(path=folder / f"empty-{place}.png")
        server.kill()
        expect(page.locator(".banner")).to_contain_text("Disconnected, retrying")
        page.screenshot(path=folder / "disconnected.png")
        visitor.go("tenants")
        expect(page.get_by_text("Could not load tenants")).to_be_visible()
        page.screenshot(path=folder / "error.png")
    finally:
        server.kill()


def share(times: list[float], part: float) -> float:
    """The time that this share of them does not exceed."""
    return times[min(len(times) - 1, int(len(times) * part))]


@contextmanager
def traffic(server: Server) -> Iterator[None]:
    """Allocations that come and go meanwhile."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.02):
            made = asked(server, "POST", "/v1/allocations", {"profile": "1g.10gb"})
            asked(server, "DELETE", f"/v1/allocations/{made['id']}")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_ten_thousand_gpus_are_drawn_smoothly(
    visit: Visit, tmp_path_factory: pytest.TempPathFactory, tell: Tell
) -> None:
    server = Server(
        tmp_path_factory.mktemp("large"),
        # Spread over all GPUs, so that there is something to draw everywhere.
        settings=["limits.requests_per_second=1000000", "policy=worst-fit"],
    )
    server.start()
    try:
        rng = random.Random(5)
        for number in range(10):
            body = {"name": f"row-{number:02}", "model": "A100-80GB", "gpus": 1000}
            asked(server, "POST", "/v1/nodes", body)
        profiles = ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb"]
        for _ in range(90):
            batch = [{"profile": rng.choice(profiles), "count": 4} for _ in range(50)]
            asked(server, "POST", "/v1/allocations/batch", {"allocations": batch})
        visitor = visit(server)
        page = visitor.sign_in(server.admin_token)
        expect(page.locator("#map-count")).to_have_text("10,000 of 10,000 GPUs shown")
        page.evaluate(PAINTS)
        with traffic(server):
            frames = page.evaluate(FRAMES, 40) + page.evaluate(FRAMES, 4000)
        paints = sorted(page.evaluate("window.paints"))
        frames.sort()
        tell(
            f"10,000 GPUs under traffic: {len(frames)} frames, median {share(frames, 0.5):.1f} ms, "
            f"95% {share(frames, 0.95):.1f} ms, worst {frames[-1]:.1f} ms; painting one: "
            f"median {share(paints, 0.5):.1f} ms, worst {paints[-1]:.1f} ms"
        )
        assert len(paints) > 100  # it was really drawn
        before = page.locator(".map").evaluate("view => view.scrollTop")
        assert before > 0
        page.get_by_role("application").focus()
        page.keyboard.press("End")
        expect(page.get_by_label("The chosen GPU")).to_contain_text("row-09 · GPU 999")
        folder = ARTEFACTS / "light"
        folder.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=folder / "ten-thousand.png")
    finally:
        server.kill()


def test_the_theme_button_overrides_the_system(busy: Server, visit: Visit) -> None:
    page = visit(color_scheme="light").sign_in(busy.admin_token)

    def background() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = background()
    page.get_by_role("button", name="Dark theme").click()
    dark = background()
    assert dark != light
    page.emulate_media(color_scheme="dark")
    page.reload()
    page.get_by_role("button", name="Light theme").click()
    assert background() == light
    page.reload()
    expect(page.get_by_role("button", name="Dark theme")).to_be_visible()
    assert background() == light
