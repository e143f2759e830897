"""Serve the static files of the dashboard from memory, with a strict content security policy.

All files are read once. Requests look up a table, so path traversal is impossible. The path of
an asset contains a hash of all files, so browsers may cache it forever.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from secrets import token_hex

from slicewise.control.answers import RefusedError
from slicewise.server.requests import Receive, Scope, Send, matches_tag, problem

VIEWS = (
    "cluster",
    "ask",
    "overview",
    "queue",
    "allocations",
    "nodes",
    "tenants",
    "audit",
    "defrag",
    "compare",
)
"""The paths that open the page at one of its views."""

RETURN = "sign-in"
"""The path to which an identity provider sends people back."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content security policy: own files only, nothing inline."""

_CONTENT = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_IMMUTABLE = b"public, max-age=31536000, immutable"
_REVALIDATE = b"no-cache"
_VERSION = b"{version}"


@dataclass(frozen=True, slots=True)
class _File:
    """One file, ready to be sent."""

    plain: bytes
    packed: bytes
    tag: bytes
    headers: list[tuple[bytes, bytes]]


class StaticPages:
    """An ASGI application that serves the dashboard's files and nothing else."""

    def __init__(self) -> None:
        found = dict(_walk(files(__package__) / "static", ""))
        digest = hashlib.sha256()
        for name in sorted(found):
            digest.update(name.encode() + b"\0" + found[name] + b"\0")
        self.version = digest.hexdigest()[:16]
        """A hash of the content of all files."""
        index = found.pop("index.html").replace(_VERSION, self.version.encode())
        page = _file("index.html", index, _REVALIDATE)
        self._files = {f"/{view}": page for view in ("", RETURN, *VIEWS)}
        for name, content in found.items():
            self._files[f"/assets/{self.version}/{name}"] = _file(name, content, _IMMUTABLE)

    @property
    def paths(self) -> list[str]:
        """All paths served."""
        return sorted(self._files)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        method = scope["method"]
        file = self._files.get(scope["path"])
        if file is None:
            refusal = RefusedError(404, "no such page; the dashboard is at /")
            await problem(refusal).send(send, token_hex(8), method == "HEAD")
            return
        if method not in ("GET", "HEAD"):
            answer = problem(RefusedError(405, f"a page takes GET and HEAD, not {method}"))
            answer.headers.append((b"allow", b"GET, HEAD"))
            await answer.send(send, token_hex(8))
            return
        sent = dict(scope["headers"])
        status, body, headers = 200, file.plain, list(file.headers)
        if matches_tag(sent.get(b"if-none-match", b""), file.tag):
            status, body = 304, b""
        else:
            if b"gzip" in sent.get(b"accept-encoding", b""):
                body = file.packed
                headers.append((b"content-encoding", b"gzip"))
            headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        whole = body if method == "GET" else b""
        await send({"type": "http.response.body", "body": whole})


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Every file of a known kind, by its path below the folder."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk(entry, f"{prefix}{entry.name}/")
        elif _ending(entry.name) in _CONTENT:
            yield prefix + entry.name, entry.read_bytes()


def _ending(name: str) -> str:
    return f".{name.rpartition('.')[2]}"


def _file(name: str, content: bytes, caching: bytes) -> _File:
    tag = b'"%b"' % hashlib.sha256(content).hexdigest()[:32].encode()
    headers = [
        (b"content-type", _CONTENT[_ending(name)]),
        (b"etag", tag),
        (b"cache-control", caching),
        (b"vary", b"accept-encoding"),
        (b"content-security-policy", POLICY.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    ]
    return _File(content, gzip.compress(content, mtime=0), tag, headers)
