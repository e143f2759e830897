"""Sentences about a comparison, generated from its numbers.

No sentence is a fixed claim: each appears only if the numbers support it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from slicewise.lab.paper.comparison import Cell, Comparison
from slicewise.lab.paper.published import RATIO

_TWICE = 2
"""Acceptance rates are also counted within this many times their margin."""

_FILLING = ("FF", "BF-BI")
"""Policies that fill one GPU before the next and reject if that one has no legal window."""
_CLEARLY_LESS = 0.5
"""The share of the margin by which they schedule clearly less."""

_PACKING = ("MFI", "BF-BI", "FF")
"""Policies that keep the number of active GPUs low."""
_FAR_LESS = 0.5
"""The share of the published value below which fragmentation is far less."""

_OPEN = "No reading of the paper that was tried explains it."

_NAMED = 3
"""The maximum number of cells that a sentence names."""


def findings(comparison: Comparison) -> list[str]:
    """Return all findings: agreement, leaders, and unexplained differences."""
    return [*agreement(comparison), *leaders(comparison), *unexplained(comparison)]


def agreement(comparison: Comparison) -> list[str]:
    """Return how many numbers agree, and the largest difference of each quantity."""
    sentences: list[str] = []
    for quantity in comparison.quantities:
        cells = comparison.judged(quantity.key)
        if not cells:
            continue
        worst = max(cells, key=lambda cell: abs(cell.difference))
        counts = _share(sum(cell.within for cell in cells), len(cells))
        counts += f" within {quantity.margin_text}"
        if quantity.key == "acceptance_rate":
            wide = _TWICE * quantity.margin
            near = sum(quantity.within(c.published, c.ours, wide) for c in cells)
            counts += f" and {near} within {wide:g}"
        sentences.append(f"{quantity.title}: {counts}. Largest difference: {_cell(worst)}.")
    return sentences


def leaders(comparison: Comparison) -> list[str]:
    """Return the policies with the best acceptance and fragmentation, here and in the paper."""
    sentences = [
        _leaders(comparison, "acceptance_rate", "highest acceptance rate", max),
        _leaders(comparison, "fragmentation", "lowest fragmentation", min),
        _leaders(comparison, "fragmentation", "highest fragmentation", max),
    ]
    return [sentence for sentence in sentences if sentence]


def unexplained(comparison: Comparison) -> list[str]:
    """Return the known unexplained differences, then all other cells outside their margin."""
    less_scheduled = [
        cell
        for cell in comparison.judged(RATIO)
        if cell.policy in _FILLING and cell.difference < -_CLEARLY_LESS * cell.quantity.margin
    ]
    less_fragmented = [
        cell
        for cell in comparison.judged("fragmentation")
        if cell.policy in _PACKING and not cell.within and cell.ours < _FAR_LESS * cell.published
    ]
    sentences: list[str] = []
    if less_scheduled:
        gaps = sorted(-cell.difference for cell in less_scheduled)
        sentences.append(
            f"{_policies(less_scheduled)} schedule{_s(less_scheduled)} less than published for "
            f"{_distributions(less_scheduled)}: {_range(gaps, 3)} below, relative to MFI "
            f"({_pairs(_largest_first(less_scheduled))}). {_OPEN}"
        )
    if less_fragmented:
        sentences.append(
            f"Policies that pack leave far less fragmentation here than published: "
            f"{_policies(less_fragmented)} for {_distributions(less_fragmented)} "
            f"({_pairs(less_fragmented)}). {_OPEN}"
        )
    known = [*less_scheduled, *less_fragmented]
    for quantity in comparison.quantities:
        cells = [c for c in comparison.judged(quantity.key) if not c.within and c not in known]
        if cells:
            further = "further " if any(c.quantity == quantity for c in known) else ""
            lie = "cell lies" if len(cells) == 1 else "cells lie"
            sentences.append(
                f"{quantity.title}: {len(cells)} {further}{lie} outside the margin of "
                f"{quantity.margin_text}: {_pairs(_largest_first(cells))}."
            )
    return sentences


def readings(lifetime: str) -> list[str]:
    """Return how open points of the paper were read; ``lifetime`` is the rule that ran."""
    return [
        "The score is read as partial: a window counts as blocked when it holds both free and "
        "occupied slices. This is the reading that gives the paper's worked example.",
        _LIFETIMES.get(lifetime, f"Lifetimes follow the rule {lifetime!r}."),
        "A 7g.80gb instance takes a window of 8 memory slices, as on the hardware; the paper's "
        "table counts its 7 compute slices.",
        "The baselines are strict: they pick one GPU by its free compute and memory, and when "
        "that one has no legal window the request is rejected without trying another.",
        "The row 0.85 covers demand from 85% up to 90% of capacity; acceptance is counted over "
        "the arrivals in it, everything else is read at its end.",
    ]


_LIFETIMES = {
    "capacity": "Lifetimes are uniform between 1 slot and as many slots as the cluster has "
    "memory slices (800 for 100 A100s). The paper's own words give the number of slots until "
    "demand reaches 100%, but with that utilization stays near 50%, far from its figures.",
    "saturation": "Lifetimes are uniform between 1 slot and the number of slots until demand "
    "reaches 100% of capacity. These are the paper's own words, but utilization then stays near "
    "50%, far from its figures; the rule \u201ccapacity\u201d comes closer.",
}


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


def _range(values: Sequence[float], decimals: int) -> str:
    low, high = f"{values[0]:.{decimals}f}", f"{values[-1]:.{decimals}f}"
    return low if low == high else f"{low} to {high}"


def _policies(cells: Sequence[Cell]) -> str:
    return _and(dict.fromkeys(cell.policy for cell in cells))


def _distributions(cells: Sequence[Cell]) -> str:
    return _and(dict.fromkeys(cell.distribution for cell in cells))


def _s(cells: Sequence[Cell]) -> str:
    """Return the verb ending for the policies of these cells as the subject."""
    return "s" if len({cell.policy for cell in cells}) == 1 else ""


def _and(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
