"""The side-by-side tables of the report: published, ours, difference."""

from __future__ import annotations

from html import escape

from slicewise.paper.comparison import Cell, Comparison
from slicewise.paper.published import Published
from slicewise.paper.quantities import Quantity


def summary_tiles(comparison: Comparison) -> str:
    """How many cells of each quantity agree, at a glance."""
    tiles: list[str] = []
    for quantity in comparison.quantities:
        cells = comparison.judged(quantity.key)
        if not cells:
            continue
        agreeing = sum(cell.within for cell in cells)
        state = "good" if agreeing == len(cells) else "some"
        tiles.append(
            f'<li class="{state}"><a href="#{_anchor(quantity)}"><b>{agreeing} of {len(cells)}</b> '
            f"<span>{escape(quantity.title)}</span></a></li>"
        )
    return f'<ul class="tiles">{"".join(tiles)}</ul>'


def quantity_section(comparison: Comparison, quantity: Quantity, paper: Published) -> str:
    """One quantity: what it is, its margin, and a small table for each distribution."""
    cells = comparison.of(quantity.key)
    distributions = list(dict.fromkeys(cell.distribution for cell in cells))
    tables = "".join(
        _table(distribution, [c for c in cells if c.distribution == distribution])
        for distribution in distributions
    )
    pairs = " pairs" if len(distributions) % 3 == 1 else ""  # no table alone in the last line
    unit = f", in {quantity.unit}" if quantity.unit else ""
    return (
        f'<section class="quantity" id="{_anchor(quantity)}">'
        f"<h3>{escape(quantity.title)}</h3>"
        f"<p>{escape(_sentence(quantity.meaning + unit))} "
        f"Published in {escape(paper.sources[quantity.key])}; "
        f"margin {escape(quantity.margin_text)}.</p>"
        f'<div class="tables{pairs}">{tables}</div></section>'
    )


def _table(distribution: str, cells: list[Cell]) -> str:
    rows = "".join(map(_row, cells))
    return (
        f"<table><caption>{escape(distribution)}</caption><thead><tr>"
        '<th scope="col">Policy</th><th scope="col">Published</th>'
        '<th scope="col">Ours</th><th scope="col">Difference</th><th scope="col">Margin</th>'
        f"</tr></thead><tbody>{rows}</tbody></table>"
    )


def _row(cell: Cell) -> str:
    text = cell.quantity.text
    state, ours = "", text(cell.ours)
    if cell.is_reference:
        verdict = '<td colspan="2"><span class="note">the reference</span></td>'
    else:
        if cell.interval is not None:
            half = (cell.interval[1] - cell.interval[0]) / 2
            ours += f' <span class="note">&plusmn;&nbsp;{text(half)}</span>'
        if cell.within:
            judgement = '<span class="note">within</span>'
        else:
            state, judgement = ' class="out"', '<span class="flag">outside</span>'
        verdict = f"<td>{_signed(cell)}</td><td>{judgement}</td>"
    return (
        f'<tr{state}><th scope="row">{escape(cell.policy)}</th>'
        f"<td>{text(cell.published)}</td><td>{ours}</td>{verdict}</tr>"
    )


def _signed(cell: Cell) -> str:
    size = cell.quantity.text(abs(cell.difference))
    if not float(size):
        return size
    return ("+" if cell.difference > 0 else "&minus;") + size


def _anchor(quantity: Quantity) -> str:
    return "table-" + quantity.key.replace("_", "-")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
