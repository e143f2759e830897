"""Take the screenshots of docs/dashboard.md from a running demo.

    .venv/bin/python docs/make_screens.py [SECONDS]

Starts `slicewise demo` on a free port, lets it run (150 seconds by default), and takes screenshots
with Chromium. The recording of Compare always shows the same run; the other pages show random
traffic. The screenshot of a Kubernetes cluster is taken by `tests/kubernetes_e2e/test_dashboard.py`
if SLICEWISE_SCREENS is set.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "screens"
sys.path.insert(0, str(HERE.parent))
from scripts.test_services import require_chromium  # noqa: E402 - the folder above is not a package

WIDE = {"width": 1280, "height": 800}
RECORDED = range(0, 305, 8)
"""The requests after which a frame of the recording is taken."""
FRAME_MILLISECONDS = 230
LAST_MILLISECONDS = 3500
QUALITY = 82


def main() -> None:
    """Take all screenshots."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 150.0
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, start_demo(Path(folder)) as demo:
        assert demo.stdout is not None
        url = token = ""
        for line in demo.stdout:
            if found := re.match(r"slicewise is at (\S+)", line):
                url = found[1]
            if found := re.search(r"the admin token is in (\S+)", line):
                token = Path(found[1]).read_text().strip()
                break
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=require_chromium(), args=["--no-sandbox"]
                )
                record(browser, url, token)
                time.sleep(seconds)
                take(browser, url, token)
                browser.close()
        finally:
            demo.terminate()


def start_demo(folder: Path) -> subprocess.Popen[str]:
    """Start a demo with a high request rate."""
    command = [sys.executable, "-m", "slicewise.cli", "demo", "--data", str(folder / "demo")]
    command += ["--listen", "127.0.0.1:0", "--rate", "9", "--hold", "12"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def signed_in(browser: Browser, url: str, token: str, path: str, scheme: str = "light") -> Page:
    """Open a page and sign in with the token."""
    page = browser.new_page(viewport=WIDE, color_scheme=scheme, locale="en")  # type: ignore[arg-type]
    page.goto(f"{url}/{path}")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".line")).to_have_text("live")
    return page


def record(browser: Browser, url: str, token: str) -> None:
    """Record a run of Compare, frame by frame."""
    page = signed_in(browser, url, token, "compare?length=500")
    page.set_viewport_size({"width": 1160, "height": 1000})
    request = page.get_by_label("Request", exact=True)
    expect(request).to_be_visible()
    top, bottom = (page.locator(s).bounding_box() for s in (".told", ".comparison"))
    assert top is not None
    assert bottom is not None
    clip = {
        "x": top["x"] - 8,
        "y": top["y"] - 8,
        "width": top["width"] + 16,
        "height": bottom["y"] + bottom["height"] - top["y"] + 14,
    }
    frames = []
    for step in RECORDED:
        request.fill(str(step))
        expect(page.locator("#compare-place")).to_have_text(f"{step} of 500")
        shot = page.screenshot(clip=clip)  # type: ignore[arg-type]
        frames.append(Image.open(io.BytesIO(shot)).convert("RGB"))
    waits = [FRAME_MILLISECONDS] * (len(frames) - 1) + [LAST_MILLISECONDS]
    frames[0].save(
        FOLDER / "compare.webp",
        save_all=True,
        append_images=frames[1:],
        duration=waits,
        loop=0,
        quality=QUALITY,
        method=6,
    )
    page.close()


def take(browser: Browser, url: str, token: str) -> None:
    """Take a screenshot of each page that the document shows."""
    page = signed_in(browser, url, token, "cluster")
    page.get_by_role("application").focus()
    save_screenshot(page, "cluster")
    page.close()
    for path, selector, scheme in (
        ("ask", "#verdict", "light"),
        ("overview", ".chart svg", "light"),
        ("defrag?profile=7g.80gb", ".moves, .stand-in:not(.loading)", "dark"),
    ):
        page = signed_in(browser, url, token, path, scheme)
        expect(page.locator(selector).first).to_be_visible()
        if path == "ask":
            page.get_by_label("Profile", exact=True).select_option("2g.20gb")
            expect(page.locator("#verdict")).to_contain_text("2g.20gb")
        if path.startswith("defrag"):
            wait_for_a_plan(page)
        save_screenshot(page, path.partition("?")[0] + ("-dark" if scheme == "dark" else ""))
        page.close()


def wait_for_a_plan(page: Page) -> None:
    """Plan again until the cluster is fragmented enough for a plan with moves."""
    while not page.locator(".moves").count():
        page.wait_for_timeout(1000)
        page.get_by_role("button", name="Plan again").click()
        expect(page.locator(".moves, .stand-in:not(.loading)").first).to_be_visible()


def save_screenshot(page: Page, name: str) -> None:
    """Save a screenshot of the page."""
    page.wait_for_timeout(300)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.save(FOLDER / f"{name}.webp", quality=QUALITY, method=6)


if __name__ == "__main__":
    main()
