"""The report of a sweep: one page that holds everything, with tables to sort."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from html import escape
from importlib.resources import files

from slicewise.figures.rows import Row, distinct
from slicewise.figures.sweep_tables import (
    LIMIT,
    long_table,
    rejected_tables,
    shown_rows,
    winner_tiles,
)

_OPEN_GROUPS = 4
"""Groups of drawings that are unfolded from the beginning."""

_INDIGO = "#332288"
"""The colour of a policy that would be lost on a dark ground; there the page has a lighter one."""


@dataclass(frozen=True)
class Drawing:
    """A drawing as an ``<svg>`` element, and what stands above it."""

    title: str
    svg: str


@dataclass(frozen=True)
class DrawingGroup:
    """Drawings that are shown together."""

    title: str
    drawings: tuple[Drawing, ...]
    needs_legend: bool = True


@dataclass(frozen=True)
class SweepMeta:
    """What was run, so that a reader can run it again."""

    title: str
    file: str
    """The name of the experiment file."""
    text: str
    """The experiment file, word for word."""
    summary: str
    """What it spans, in one line."""
    facts: Mapping[str, str]
    incomplete: str = ""
    """A sentence that says what is missing; empty when everything was run."""
    left_out: str = ""
    """A sentence on drawings that were left out."""
    legend: Mapping[str, str] = field(default_factory=dict)
    """By policy: a piece of its line, as an ``<svg>`` element."""


def render_sweep(meta: SweepMeta, rows: Sequence[Row], groups: Sequence[DrawingGroup]) -> str:
    """The whole page: who does best, drawings, tables, and what was run.

    It loads nothing, and runs no script but its own, which sorts and filters the tables.
    """
    steady = "load" in rows[0]
    shown = shown_rows(rows)
    script = _part("sweep_page.js")
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    figure = "Rejected requests" if steady else "Accepted requests"
    body = "".join(
        (
            f"<header><h1>{escape(meta.title)}</h1><p>{escape(meta.summary)}</p></header>\n",
            _notice("Not complete.", meta.incomplete),
            _section("glance", "At a glance", winner_tiles(shown) if steady else ""),
            _section("drawings", figure, _drawings(meta, groups)),
            _section("rejected", "Rejected requests in numbers", _rejected(shown, steady)),
            _section("reading", "How to read it", _reading(shown, steady)),
            _section("run", "What was run", _run(meta)),
            _section("figures", "All figures", _all_figures(shown, steady)),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(meta.title)}</title>\n<style>\n{_part('sweep_page.css')}</style>\n"
        f"</head>\n<body>\n<main>\n{body}</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _section(identity: str, title: str, content: str) -> str:
    if not content:
        return ""
    return f'<section id="{identity}"><h2>{escape(title)}</h2>{content}</section>\n'


def _notice(title: str, words: str) -> str:
    if not words:
        return ""
    return f'<p class="notice" role="note"><b>{escape(title)}</b> {escape(words)}</p>\n'


def _drawings(meta: SweepMeta, groups: Sequence[DrawingGroup]) -> str:
    content: list[str] = []
    if any(group.needs_legend for group in groups):
        items = "".join(
            f"<li>{_themed(svg)}{escape(name)}</li>" for name, svg in meta.legend.items()
        )
        content.append(f'<ul class="legend" aria-label="Policies">{items}</ul>')
    for place, group in enumerate(groups):
        figures = "".join(
            f"<figure>{f'<h4>{escape(drawing.title)}</h4>' if drawing.title else ''}"
            f"{_themed(drawing.svg)}</figure>"
            for drawing in group.drawings
        )
        # No panel alone in the last line.
        form = " pairs" if len(group.drawings) % 3 == 1 and len(group.drawings) > 1 else ""
        form = form if group.needs_legend else " wide"
        content.append(
            f'<details class="card"{" open" if place < _OPEN_GROUPS else ""}>'
            f"<summary><h3>{escape(group.title)}</h3></summary>"
            f'<div class="panels{form}">{figures}</div></details>'
        )
    return "".join(content) + _notice("Not all is drawn.", meta.left_out)


def _themed(svg: str) -> str:
    return svg.replace(_INDIGO, f"var(--figure-indigo, {_INDIGO})")


def _rejected(rows: Sequence[Row], steady: bool) -> str:
    tables = rejected_tables(rows) if steady else ""
    if not tables:
        return ""
    return (
        "<p>The lowest share of each column is marked. After &plusmn; stands half of the 95% "
        f"interval. A click on a heading sorts by it, a second click the other way.</p>{tables}"
    )


def _all_figures(rows: Sequence[Row], steady: bool) -> str:
    at = "" if steady else "At 85% demand; the other bins are in <code>summary.parquet</code>. "
    return f"<p>{at}A click on a heading sorts by it.</p>{long_table(rows)}"


def _run(meta: SweepMeta) -> str:
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>"
        for name, fact in meta.facts.items()
    )
    return (
        f'<dl class="facts">{facts}</dl><p><code>{escape(meta.file)}</code>, from which every '
        f"number here follows:</p><pre><code>{escape(meta.text.strip())}</code></pre>"
        "<p>Beside this page lie <code>summary.parquet</code>, with the rows of the tables, and "
        "<code>runs.parquet</code>, with the sums of every single run.</p>"
    )


def _reading(rows: Sequence[Row], steady: bool) -> str:
    sentences = [
        "All policies see the same arrivals, run by run; intervals are over the runs.",
        "Utilization: occupied slices. Active: GPUs with at least one instance. "
        "F: the mean fragmentation score over all GPUs.",
    ]
    if steady:
        first = str(rows[0]["compared_with"])
        sentences[1:1] = [
            "Arrivals go on for many lifetimes at a constant offered load: the demand that would "
            "stand if nothing were rejected, as a share of all slices.",
            "Rejected: requests that found no place; of slices: the same, weighed by size.",
            "Where a scale reads 0.1%, 1%, 10%, every step is ten times the one below; the lowest "
            "step goes down to zero.",
            f"More than {first}: the difference in rejected requests, paired run by run.",
        ]
        if any(row["policy"] == LIMIT for row in rows):
            sentences.append(
                f"{LIMIT} is no policy but the limit: it may move every instance at no cost, and "
                "has no GPUs in particular."
            )
        missing = dict.fromkeys(row["oracle_missing"] for row in rows if row["policy"] == LIMIT)
        sentences += [f"No {LIMIT}: {why}." for why in missing if why is not None]
    else:
        sentences[1:1] = [
            "An empty cluster is filled until everything requested adds up to its capacity; "
            "demand is what was requested so far, as a share of it.",
            "Accepted: placed requests over arrivals, within 5 points of demand.",
        ]
    if len(distinct(rows, "seed")) > 1:
        sentences.append("Several seeds are several lines of the same look, and rows of their own.")
    return _list(sentences)


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"
