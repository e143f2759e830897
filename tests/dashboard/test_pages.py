"""The files of the dashboard: headers, caching, and refused paths."""

from __future__ import annotations

import asyncio
import gzip
import re
from pathlib import Path

import httpx
import pytest
from tests.server.harness import Harness

from slicewise.config.settings import Settings
from slicewise.dashboard.pages import POLICY, VIEWS, StaticPages
from slicewise.runtime.steady_clock import SteadyClock
from slicewise.server.service import Service

PAGES = StaticPages()
STATIC = Path(__file__).parents[2] / "src" / "slicewise" / "dashboard" / "static"


def ask(path: str, method: str = "GET", headers: dict[str, str] | None = None) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(PAGES)
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
            sent = {"accept-encoding": "identity"} | (headers or {})
            return await client.request(method, path, headers=sent)

    return asyncio.run(go())


def raw(path: str) -> int:
    """The status of a path that no client would send as it is."""
    statuses: list[int] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: object) -> None:
        assert isinstance(message, dict)
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    asyncio.run(PAGES(scope, receive, send))
    return statuses[0]


def test_every_view_is_the_same_page() -> None:
    page = ask("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for view in VIEWS:
        assert ask(f"/{view}").content == page.content
    for link in re.findall(r'(?:href|src)="([^"]+)"', page.text):
        assert ask(link).status_code == 200, link
    titles = (STATIC / "pages" / "places.js").read_text()
    assert sorted(re.findall(r'id: "(\w+)"', titles)) == sorted(VIEWS)


def test_every_response_has_the_content_security_policy() -> None:
    for path in PAGES.paths:
        answer = ask(path)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY
    assert "*" not in POLICY


def test_the_page_conforms_to_the_content_security_policy() -> None:
    page = ask("/").text
    assert "<style" not in page
    assert " style=" not in page
    assert not re.search(r"\son\w+=", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
    assert "http:" not in page
    assert "https:" not in page
    for file in STATIC.rglob("*.js"):
        code = file.read_text()
        for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert unsafe not in code, file.name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", code), file.name
        for module in re.findall(r'(?:from|import\() ?"([^"]+)"', code):
            assert (file.parent / module).resolve().is_file(), f"{file.name}: {module}"


def test_assets_are_cached_and_the_page_is_revalidated() -> None:
    page = ask("/")
    assert page.headers["cache-control"] == "no-cache"
    script = next(path for path in PAGES.paths if path.endswith("/main.js"))
    assert script == f"/assets/{PAGES.version}/main.js"
    answer = ask(script)
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-type"].startswith("text/javascript")
    for path, tag in (("/", page.headers["etag"]), (script, answer.headers["etag"])):
        for condition in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            again = ask(path, headers={"if-none-match": condition})
            assert again.status_code == 304, condition
            assert again.content == b""
        assert ask(path, headers={"if-none-match": '"other"'}).status_code == 200


def test_files_are_compressed_if_accepted() -> None:
    plain = ask("/")
    packed = ask("/", headers={"accept-encoding": "gzip, br"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content  # the client unpacks
    assert int(packed.headers["content-length"]) < len(plain.content)
    assert gzip.compress(plain.content, mtime=0)[:2] == b"\x1f\x8b"


def test_head_answers_without_a_body() -> None:
    whole = ask("/cluster")
    head = ask("/cluster", "HEAD")
    assert head.status_code == 200
    assert head.content == b""
    assert head.headers["content-length"] == str(len(whole.content))
    assert head.headers["etag"] == whole.headers["etag"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"])
def test_pages_accept_get_and_head_only(method: str) -> None:
    answer = ask("/", method)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/cluster/",
        "//",
        "",
        "/assets",
        "/assets/",
        f"/assets/{PAGES.version}",
        f"/assets/{PAGES.version}/",
        f"/assets/{PAGES.version}/index.html",
        f"/assets/{PAGES.version}/../pages.py",
        f"/assets/{PAGES.version}/%2e%2e/pages.py",
        f"/assets/{PAGES.version}/..\\pages.py",
        "/assets/0000000000000000/main.js",
        "/../../../../etc/passwd",
        "/static/index.html",
        "/main.js",
        "/index.html",
        "/__init__.py",
        "/cluster\0.html",
        "/clüster",
    ],
)
def test_other_paths_are_refused(path: str) -> None:
    assert raw(path) == 404


def test_unknown_pages_are_a_problem_document() -> None:
    answer = ask("/nothing")
    assert answer.status_code == 404
    assert answer.json()["detail"] == "no such page; the dashboard is at /"


def test_the_service_delegates_other_paths_to_the_pages(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    try:
        settings = Settings(data=tmp_path / "paged", lease_seconds=0.5)
        assert harness.store is not None
        steady = SteadyClock(harness.clock, harness.clock)
        service = Service(harness.store, settings, steady, pages=StaticPages())
        for path, status in (("/", 200), ("/compare", 200), ("/nothing", 404), ("/v1/none", 404)):
            assert harness.get(path, service=service, token=None).status_code == status
        assert harness.get("/healthz", service=service, token=None).json() == {"status": "ok"}
        assert harness.get("/", token=None).status_code == 404  # without pages
    finally:
        harness.close()


def test_modules_are_short_enough_to_read() -> None:
    for file in STATIC.rglob("*.js"):
        lines = file.read_text().splitlines()
        assert len(lines) <= 400, file.name
        assert lines[0].startswith("/** "), file.name
