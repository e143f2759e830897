"""The report: one page that holds everything and needs nothing, online or off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from slicewise.paper.captions import caption
from slicewise.paper.comparison import Comparison
from slicewise.paper.findings import readings, unexplained
from slicewise.paper.published import Published, published
from slicewise.paper.svg import check_ids, inline_svg
from slicewise.paper.tables import quantity_section, summary_tiles

_TITLE = "slicewise beside the paper"

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Told to the browser: run nothing, load nothing."""

_CLOSEST_LIFETIME = "capacity"
"""The lifetime rule under which the paper's figures come out."""


@dataclass(frozen=True)
class RunMeta:
    """What was run, so that a reader can run it again."""

    runs: int
    seed: int
    gpus: int
    model: str
    lifetime: str
    """The rule for lifetimes: capacity or saturation."""
    version: str
    command: str
    """The command line that gives this report again."""
    interrupted: str = ""
    """A sentence that says what is missing; empty when everything was run."""


def render_report(
    meta: RunMeta,
    comparison: Comparison,
    findings: Sequence[str],
    figures: Mapping[str, str],
) -> str:
    """The whole page: findings, side-by-side tables, figures and how to read them.

    ``figures`` are SVG texts by name, shown in their order. The page loads nothing and runs no
    script; an SVG that would is refused.
    """
    paper = published()
    open_points = unexplained(comparison)
    body = "".join(
        (
            _header(meta, paper),
            _notices(meta, paper),
            _section("findings", "Key findings", _findings(comparison, findings, open_points)),
            _section("run", "What was run", _run(meta, paper)),
            _section("tables", "Side by side", _tables(comparison, paper)),
            _section("figures", "Figures", _figures(figures)) if figures else "",
            _section(
                "unexplained",
                "What is not explained",
                _unexplained(meta, paper, comparison, open_points),
            ),
            _section("reading", "How to read it", _reading(meta)),
            _section("citation", "The paper", _citation(paper)),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(_TITLE)}</title>\n<style>\n{_css()}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _css() -> str:
    return files(__package__).joinpath("report.css").read_text(encoding="utf-8")


def _section(identity: str, title: str, content: str) -> str:
    return f'<section id="{identity}"><h2>{escape(title)}</h2>{content}</section>\n'


def _header(meta: RunMeta, paper: Published) -> str:
    return (
        f"<header><h1>{escape(_TITLE)}</h1><p>The experiment of "
        f"<cite>{escape(paper.title)}</cite>, run again: {meta.runs:,} runs on {meta.gpus:,} "
        f"{escape(meta.model)} GPUs.</p></header>\n"
    )


def _notices(meta: RunMeta, paper: Published) -> str:
    notices: list[str] = []
    if meta.interrupted:
        notices.append(f"<b>Not complete.</b> {escape(meta.interrupted)}")
    if not _same_setting(meta, paper):
        notices.append(
            f"<b>Another setting.</b> The published figures are for {paper.gpus} "
            f"{escape(paper.model)} GPUs; differences from them are to be expected here."
        )
    return "".join(f'<p class="notice" role="note">{notice}</p>\n' for notice in notices)


def _findings(comparison: Comparison, findings: Sequence[str], open_points: Sequence[str]) -> str:
    """Agreement at a glance, then the sentences; what is not explained has its own section."""
    if not comparison.cells:
        return "<p>Nothing that was run has a published figure to be compared with.</p>"
    content = "<p>Numbers that agree with the paper within the margin:</p>"
    content += summary_tiles(comparison)
    content += _list(finding for finding in findings if finding not in open_points)
    if open_points:
        count = "One point is" if len(open_points) == 1 else f"{len(open_points)} points are"
        content += f'<p class="notice"><a href="#unexplained">{count} not explained</a>.</p>'
    return content


def _run(meta: RunMeta, paper: Published) -> str:
    facts = {
        "Runs": f"{meta.runs:,} (the paper: {paper.runs:,})",
        "Seed": str(meta.seed),
        "Cluster": f"{meta.gpus:,} {meta.model} GPUs",
        "Lifetimes": meta.lifetime,
        "Version": f"slicewise {meta.version}",
    }
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items()
    )
    return (
        f'<dl class="facts">{rows}</dl><p>To run it again:</p>'
        f"<pre><code>{escape(meta.command)}</code></pre>"
    )


def _tables(comparison: Comparison, paper: Published) -> str:
    if not comparison.cells:
        return "<p>There is nothing to compare.</p>"
    sections = "".join(
        quantity_section(comparison, quantity, paper) for quantity in comparison.quantities
    )
    return (
        "<p>After &plusmn; stands half of the 95% interval. A difference larger than the margin "
        'is marked <span class="flag">outside</span>; MFI relative to itself is not judged.</p>'
        + sections
    )


def _figures(figures: Mapping[str, str]) -> str:
    drawings: list[str] = []
    content: list[str] = []
    for name, text in figures.items():
        words = caption(name)
        svg = inline_svg(name, text, words.alt)
        drawings.append(svg)
        content.append(
            f"<figure><h3>{escape(words.title)}</h3>"
            f'<div class="drawing" tabindex="0" role="group" aria-label="{escape(words.title)}">'
            f"{svg}</div>"
            f"<figcaption>{escape(words.text)}</figcaption></figure>"
        )
    check_ids(drawings)
    return "".join(content)


def _unexplained(
    meta: RunMeta, paper: Published, comparison: Comparison, open_points: Sequence[str]
) -> str:
    if not comparison.cells:
        return "<p>There is nothing to explain.</p>"
    if not open_points:
        return "<p>Every number that was compared lies within its margin.</p>"
    if _same_setting(meta, paper) and meta.lifetime == _CLOSEST_LIFETIME:
        cause = "The cause of these differences is not known."
    else:
        cause = (
            f"The setting that comes closest to the paper is {paper.gpus} {paper.model} GPUs with "
            f"the lifetime rule \u201c{_CLOSEST_LIFETIME}\u201d. This run had another, which "
            "accounts for part of these differences."
        )
    return f"<p>{escape(cause)} No number was adjusted to hide them.</p>" + _list(open_points)


def _same_setting(meta: RunMeta, paper: Published) -> bool:
    return (meta.model, meta.gpus) == (paper.model, paper.gpus)


def _reading(meta: RunMeta) -> str:
    return (
        "<p>A cluster starts empty and receives one request a slot until everything requested so "
        "far adds up to its capacity. Each request asks for one MIG instance and is placed or "
        "rejected at once. Demand counts what was requested, so utilization stays below it. "
        "All policies see the same arrivals. The paper leaves some points open; they were read "
        "like this:</p>" + _list(readings(meta.lifetime))
    )


def _citation(paper: Published) -> str:
    return (
        f'<p class="citation">{escape(paper.citation)}. The published figures on this page are '
        f"from its Figs. 5 and 6: {paper.gpus} {escape(paper.model)} GPUs, {paper.runs} runs.</p>"
    )


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"
