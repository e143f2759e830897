"""Figures as files and as SVG inside pages; the same figure always gives the same bytes."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.style import THEME, house_style

_DPI = 150
_NO_DATES: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
}

_REMOVED = re.compile(r"<!--.*?-->|<metadata>.*?</metadata>|<style\b.*?</style>", re.DOTALL)
_ID = re.compile(r'(\sid="|href="#|url\(#)')
_SIZE = re.compile(r'\s(?:width|height)="[^"]*"')
_NEUTRAL = re.compile("|".join(THEME))
_BLANK = re.compile(r"\n\s*")
_JOINS = "stroke-linejoin: round; stroke-linecap: butt"
"""The rules of the removed style sheet, which would apply to the whole page."""


def save_figure(figure: Figure, path_without_suffix: str | Path) -> list[Path]:
    """Write a figure as PNG (150 dots per inch) and SVG, creating folders; return both paths."""
    base = Path(path_without_suffix)
    # Not with_suffix: a name may contain a dot, as in "demand-0.85".
    return [save_as(figure, base.with_name(f"{base.name}.{kind}")) for kind in _NO_DATES]


def save_as(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG or SVG, by the suffix of the path, creating folders."""
    content = _render(figure, path.suffix.removeprefix("."), path.stem)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SlicewiseError(f"cannot write the figure {path}: {reason}") from error
    return path


def svg_text(figure: Figure, name: str, label: str) -> str:
    """Return a figure as an ``<svg>`` element for a page; screen readers read ``label``.

    It fills its container. Its ids begin with ``name``, which must be unique in the page. Neutral
    colours follow the page's ``--figure-ink``, ``--figure-soft``, ``--figure-grid`` and
    ``--figure-paper``.
    """
    text = _render(figure, "svg", name).decode("utf-8")
    text = _REMOVED.sub("", text[text.index("<svg") :])
    prefix = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    text = _ID.sub(lambda found: f"{found.group()}{prefix}-", text)
    text = _NEUTRAL.sub(
        lambda found: f"var(--figure-{THEME[found.group()]}, {found.group()})", text
    )
    root, rest = text.split(">", 1)
    root = _SIZE.sub("", root).replace("<svg", f'<svg style="{_JOINS}"', 1)
    text = f'{root} role="img" aria-label="{escape(label)}">{rest}'
    return _BLANK.sub("\n", text).strip()


def _render(figure: Figure, kind: str, salt: str) -> bytes:
    """Return the bytes of a figure; ``salt`` makes the ids that matplotlib generates stable."""
    out = io.BytesIO()
    with house_style(**{"svg.hashsalt": salt}):
        figure.savefig(out, format=kind, dpi=_DPI, metadata=_NO_DATES[kind])
    return out.getvalue()
