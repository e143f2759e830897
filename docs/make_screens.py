"""Take the pictures of the dashboard's document, from a running demonstration.

    .venv/bin/python docs/make_screens.py [SECONDS]

Starts `slicewise demo` on a free port, lets it run for so many seconds (150 unless given), and
takes the pictures with Chromium. The recording of Compare is always the same run; the rest shows
whatever the demonstration's tenants happen to do. The picture of a Kubernetes cluster needs one:
`tests/k8s/test_dashboard.py` takes it when SLICEWISE_SCREENS is set.
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
    """Take every picture."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 150.0
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, demonstration(Path(folder)) as demo:
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


def demonstration(folder: Path) -> subprocess.Popen[str]:
    """A demonstration with brisk traffic."""
    command = [sys.executable, "-m", "slicewise.cli", "demo", "--data", str(folder / "demo")]
    command += ["--listen", "127.0.0.1:0", "--rate", "9", "--hold", "12"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def entered(browser: Browser, url: str, token: str, path: str, scheme: str = "light") -> Page:
    """A page that somebody with this token looks at."""
    page = browser.new_page(viewport=WIDE, color_scheme=scheme, locale="en")  # type: ignore[arg-type]
    page.goto(f"{url}/{path}")
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".line")).to_have_text("live")
    return page


def record(browser: Browser, url: str, token: str) -> None:
    """Compare as it runs, frame by frame."""
    page = entered(browser, url, token, "compare?length=500")
    page.set_viewport_size({"width": 1160, "height": 1000})
    place = page.get_by_label("Request", exact=True)
    expect(place).to_be_visible()
    top, bottom = (page.locator(s).bounding_box() for s in (".told", ".duel"))
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
        place.fill(str(step))
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
    """A picture of each page that the document shows."""
    page = entered(browser, url, token, "cluster")
    page.get_by_role("application").focus()
    keep(page, "cluster")
    page.close()
    for place, inside, scheme in (
        ("ask", "#verdict", "light"),
        ("lately", ".chart svg", "light"),
        ("defrag?profile=7g.80gb", ".moves, .stand-in:not(.loading)", "dark"),
    ):
        page = entered(browser, url, token, place, scheme)
        expect(page.locator(inside).first).to_be_visible()
        if place == "ask":
            page.get_by_label("Profile", exact=True).select_option("2g.20gb")
            expect(page.locator("#verdict")).to_contain_text("2g.20gb")
        if place.startswith("defrag"):
            wait_for_a_plan(page)
        keep(page, place.partition("?")[0] + ("-dark" if scheme == "dark" else ""))
        page.close()


def wait_for_a_plan(page: Page) -> None:
    """Plan again until the tenants have left the cluster so that there is something to move."""
    while not page.locator(".moves").count():
        page.wait_for_timeout(1000)
        page.get_by_role("button", name="Plan again").click()
        expect(page.locator(".moves, .stand-in:not(.loading)").first).to_be_visible()


def keep(page: Page, name: str) -> None:
    """A picture of what is on the screen."""
    page.wait_for_timeout(300)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.save(FOLDER / f"{name}.webp", quality=QUALITY, method=6)


if __name__ == "__main__":
    main()
