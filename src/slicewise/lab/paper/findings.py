"""Sentences about a comparison, generated from its numbers.

No sentence is a fixed claim: each appears only if the numbers support it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slicewise.lab.paper.comparison import Cell, Comparison

_NAMED = 3
"""The maximum number of cells that a sentence names."""


def findings(comparison: Comparison) -> list[str]:
    """Return how many numbers agree, and which policies lead."""
    return [*agreement(comparison), *leaders(comparison)]


def agreement(comparison: Comparison) -> list[str]:
    """Return how many numbers agree, and the largest difference of each quantity."""
    sentences: list[str] = []
    for quantity in comparison.quantities:
        cells = comparison.judged(quantity.key)
        if not cells:
            continue
        worst = max(cells, key=lambda cell: abs(cell.difference))
        counts = _share(sum(cell.within for cell in cells), len(cells))
        sentences.append(
            f"{quantity.title}: {counts} within {quantity.margin_text}. "
            f"Largest difference: {_cell(worst)}."
        )
    return sentences


def leaders(comparison: Comparison) -> list[str]:
    """Return the policies with the best acceptance and fragmentation, here and in the paper."""
    sentences = [
        _leaders(comparison, "acceptance_rate", "highest acceptance rate", max),
        _leaders(comparison, "fragmentation", "lowest fragmentation", min),
        _leaders(comparison, "fragmentation", "highest fragmentation", max),
    ]
    return [sentence for sentence in sentences if sentence]


def outside(comparison: Comparison) -> list[str]:
    """Return the cells outside their margin, a sentence per quantity."""
    sentences: list[str] = []
    for quantity in comparison.quantities:
        cells = [cell for cell in comparison.judged(quantity.key) if not cell.within]
        if cells:
            lie = "cell lies" if len(cells) == 1 else "cells lie"
            sentences.append(
                f"{quantity.title}: {len(cells)} {lie} outside the margin of "
                f"{quantity.margin_text}: {_pairs(_largest_first(cells))}."
            )
    return sentences


def _leaders(
    comparison: Comparison,
    figure: str,
    what: str,
    best: Callable[..., Cell],
) -> str:
    """Return the leading policies by distribution; empty if there is only one policy."""
    here: dict[str, list[str]] = {}
    there: dict[str, list[str]] = {}
    cells = comparison.judged(figure)
    for distribution in dict.fromkeys(cell.distribution for cell in cells):
        rivals = [cell for cell in cells if cell.distribution == distribution]
        if len(rivals) > 1:
            ours = best(rivals, key=lambda cell: cell.ours).policy
            theirs = best(rivals, key=lambda cell: cell.published).policy
            here.setdefault(ours, []).append(distribution)
            there.setdefault(theirs, []).append(distribution)
    if not here:
        return ""
    if here == there:
        return f"The {what}, here as in the paper: {_by_policy(here)}."
    return f"The {what}: here {_by_policy(here)}; in the paper {_by_policy(there)}."


def _by_policy(distributions: dict[str, list[str]]) -> str:
    return _and(f"{policy} ({', '.join(names)})" for policy, names in distributions.items())


def _cell(cell: Cell) -> str:
    """Describe a cell with both values."""
    text = cell.quantity.text
    way = "above" if cell.difference > 0 else "below"
    unit = cell.quantity.unit
    points = " points" if unit else ""
    return (
        f"{cell.policy} for {cell.distribution}, {text(cell.ours)}{unit} here against "
        f"{text(cell.published)}{unit}, {text(abs(cell.difference))}{points} {way}"
    )


def _largest_first(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: -abs(cell.difference))


def _pairs(cells: Sequence[Cell]) -> str:
    """List the first cells with both values, and the number of further ones."""
    named = [
        f"{c.policy} {c.distribution} {c.quantity.text(c.ours)} against "
        f"{c.quantity.text(c.published)}"
        for c in cells
    ]
    if len(named) > _NAMED + 1:  # naming one more is as short as "1 more"
        named[_NAMED:] = [f"and {len(named) - _NAMED} more"]
    return ", ".join(named)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} cells" if whole != 1 else f"{part} of 1 cell"


def _and(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
