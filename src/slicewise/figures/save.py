"""Figures into files and pages, byte for byte the same every time."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from slicewise.core.errors import SlicewiseError
from slicewise.figures.style import THEME, house_style

_DPI = 150
_NO_DATES: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}

_ASIDE = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>|<style\b.*?</style>", re.DOTALL)
_ID = re.compile(r'(\sid="|href="#|url\(#)')
_NEUTRAL = re.compile("|".join(THEME))
_BLANK = re.compile(r"\n\s*")
_JOINS = "stroke-linejoin: round; stroke-linecap: butt"
"""What the removed style sheet says; there it would hold for the whole page."""


def save_figure(figure: Figure, path_without_suffix: str | Path) -> list[Path]:
    """Write a figure as PNG (150 dots an inch) and SVG; returns both paths.

    Folders that do not exist are made.
    """
    base = Path(path_without_suffix)
    # Not with_suffix: a name may hold a dot, as in "demand-0.85".
    return [save_as(figure, base.with_name(f"{base.name}.{kind}")) for kind in _NO_DATES]


def save_as(figure: Figure, path: Path) -> Path:
    """Write a figure as the PNG or SVG its path ends in; folders that do not exist are made."""
    content = _render(figure, path.suffix.removeprefix("."), path.stem)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SlicewiseError(f"cannot write the figure {path}: {reason}") from error
    return path


def svg_text(figure: Figure, name: str) -> str:
    """A figure as one ``<svg>`` element to put into a page.

    Its ids begin with ``name``, so that figures of different names do not disturb each other.
    Neutral colours follow the page: it may set ``--figure-ink``, ``--figure-soft``,
    ``--figure-grid`` and ``--figure-paper``.
    """
    text = _render(figure, "svg", name).decode("utf-8")
    text = _ASIDE.sub("", text[text.index("<svg") :])
    prefix = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    text = _ID.sub(lambda found: f"{found.group()}{prefix}-", text)
    text = _NEUTRAL.sub(
        lambda found: f"var(--figure-{THEME[found.group()]}, {found.group()})", text
    )
    text = text.replace("<svg ", f'<svg style="{_JOINS}" ', 1)
    return _BLANK.sub("\n", text).strip()


def _render(figure: Figure, kind: str, salt: str) -> bytes:
    """The bytes of a figure; ``salt`` goes into the ids that matplotlib makes up."""
    out = io.BytesIO()
    with house_style(**{"svg.hashsalt": salt}):
        figure.savefig(out, format=kind, dpi=_DPI, metadata=_NO_DATES[kind])
    return out.getvalue()
