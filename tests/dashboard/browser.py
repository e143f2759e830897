"""A real browser for the dashboard: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from scripts.test_services import MissingServiceError, require_chromium
from tests.e2e.server import PATIENCE_SECONDS, Server

PATIENCE = PATIENCE_SECONDS * 1000
ARTEFACTS = Path(__file__).parents[2] / "artefacts" / "dashboard"
"""Where pictures of the pages are kept."""
WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
PAGES = {
    "cluster": "Cluster",
    "overview": "Overview",
    "compare": "Compare policies",
    "ask": "Ask",
    "allocations": "Allocations",
    "queue": "Queue",
    "nodes": "Nodes",
    "defrag": "Defragment",
    "tenants": "Tenants and quotas",
    "audit": "Audit log",
}


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; without one the test is skipped with a reason, except in CI."""
    try:
        program = require_chromium()
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            # Root has no sandbox, and containers little shared memory.
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            timeout=PATIENCE,
        )
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """A user with a browser window, and all errors in it."""

    def __init__(self, browser: Browser, server: Server, **options: Any) -> None:
        self.server = server
        self.context = browser.new_context(**({"viewport": WIDE, "locale": "en"} | options))
        self.context.set_default_timeout(PATIENCE)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        """Errors of the page's scripts, and violations of its content security policy."""
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._hear)

    def _hear(self, message: Any) -> None:
        # A refused or unanswered request is shown by the page and is not an error of the page.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def open(self, path: str = "") -> Page:
        """Go to a page."""
        self.page.goto(f"{self.server.url}/{path}")
        return self.page

    def sign_in(self, token: str, path: str = "") -> Page:
        """Go to a page and sign in with the token."""
        self.open(path)
        self.page.get_by_label("Token").fill(token)
        self.page.get_by_role("button", name="Sign in").click()
        self.live()
        return self.page

    def live(self) -> None:
        """Wait until the page follows the journal."""
        expect(self.page.locator(".line")).to_have_text("live")

    def go(self, place: str) -> Page:
        """Choose a page from the menu."""
        self.page.get_by_role("navigation").get_by_text(PAGES[place], exact=True).click()
        expect(self.page.get_by_role("heading", level=1)).to_have_text(PAGES[place])
        return self.page

    def close(self) -> None:
        """Close the window; there must be no errors."""
        self.context.close()
        assert not self.complaints, self.complaints
