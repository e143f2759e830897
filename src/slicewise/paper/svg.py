"""Drawings inside a page: checked, labelled for those who cannot see them, and scalable."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from slicewise.core.errors import SlicewiseError

_ROOT = re.compile(r"<svg\b[^>]*>")
_SIZE = re.compile(r'\s(?:width|height|role|aria-label)="[^"]*"')
_ID = re.compile(r'\sid="([^"]*)"')
_REFUSED = {
    "a script": re.compile(r"<\s*script|\son\w+\s*=|javascript:", re.IGNORECASE),
    "foreign content": re.compile(r"<\s*(?:foreignObject|iframe|image|style)\b", re.IGNORECASE),
    "a declaration or comment": re.compile(r"<[!?]"),
    "an outside reference": re.compile(
        r"""href\s*=\s*["'](?!\#)|url\(\s*["']?(?!\#)|@import""", re.IGNORECASE
    ),
}


def inline_svg(name: str, text: str, label: str) -> str:
    """An SVG as part of a page: fills its container and is read out as ``label``.

    The drawing must stand on its own: an SVG that runs or loads something is refused.
    """
    text = text.strip()
    root = _ROOT.match(text)
    if root is None or not text.endswith("</svg>"):
        raise SlicewiseError(f"figure {name!r} is not a plain <svg> element")
    for what, pattern in _REFUSED.items():
        if pattern.search(text):
            raise SlicewiseError(f"figure {name!r} holds {what}, which a report must not")
    opening = _SIZE.sub("", root.group()).removesuffix(">")
    return f'{opening} role="img" aria-label="{escape(label)}">{text[root.end() :]}'


def check_ids(svgs: Iterable[str]) -> None:
    """Refuse drawings that share an id: in one page each would use the other's parts."""
    seen: set[str] = set()
    for identity in (found for svg in svgs for found in _ID.findall(svg)):
        if identity in seen:
            raise SlicewiseError(f"two elements of the report's figures have the id {identity!r}")
        seen.add(identity)
