"""Draws GPUs slice by slice: instances, free slices, and free slices that cannot be used."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from zlib import crc32

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.style import INK, PAPER, SOFT, house_style, plain

# Everything below is in inches, from the top left corner.
_SLICE, _STRIP = 0.78, 0.52
_TITLE, _NUMBERS, _LINE = 0.3, 0.24, 0.21
_EDGE, _BETWEEN_ROWS, _BETWEEN_COLUMNS = 0.2, 0.24, 0.5
_LETTERS_PER_INCH = 12.5

_LETTERS = "#111820"
"""Text on blocks; not lightened for a dark page, because blocks stay light."""
_HATCH = "#c2410c"
_BY_COMPUTE = {7: "#b9a6d3", 4: "#8fc3e8", 3: "#8ed1bd", 2: "#f3cf7a"}
_ONE_WIDE, _ONE_SLICE = "#f2ae8a", "#e8a6c8"
_OTHERS = (*_BY_COMPUTE.values(), _ONE_WIDE, _ONE_SLICE)


@dataclass(frozen=True)
class Block:
    """An instance on a GPU: a labelled block over its slices."""

    profile: str
    start: int
    size: int
    label: str = ""
    """The text on it; the profile if empty."""


@dataclass(frozen=True)
class GpuDrawing:
    """One GPU to draw; slice 0 is on the left."""

    slices: int
    blocks: Sequence[Block] = ()
    stranded: Collection[int] = ()
    """Free slices that the request cannot use; drawn hatched."""
    title: str = ""
    verdict: str = ""
    """The text below the GPU."""


def draw_gpus(gpus: Sequence[GpuDrawing], columns: int = 1) -> Figure:
    """Draw each GPU as a strip of slices with its instances, free and stranded slices."""
    if not gpus or columns < 1:
        raise SlicewiseError("a drawing needs at least one GPU and one column")
    for gpu in gpus:
        _check(gpu)
    with house_style():
        return _layout(gpus, min(columns, len(gpus)))


def profile_colour(profile: str, size: int) -> str:
    """Return the colour of a profile, the same in every drawing."""
    found = re.match(r"(\d+)g\b", profile)
    if found is None:
        return _OTHERS[crc32(profile.encode()) % len(_OTHERS)]
    compute = int(found.group(1))
    if compute == 1:
        return _ONE_SLICE if size == 1 else _ONE_WIDE
    return _BY_COMPUTE.get(compute, _OTHERS[compute % len(_OTHERS)])


def _layout(gpus: Sequence[GpuDrawing], columns: int) -> Figure:
    column = _SLICE * max(gpu.slices for gpu in gpus)
    lines = {id(gpu): textwrap.wrap(gpu.verdict, int(column * _LETTERS_PER_INCH)) for gpu in gpus}
    rows = [gpus[i : i + columns] for i in range(0, len(gpus), columns)]
    titled = [_TITLE if any(gpu.title for gpu in row) else 0.0 for row in rows]
    heights = [
        title + _STRIP + _NUMBERS + _LINE * max(len(lines[id(gpu)]) for gpu in row)
        for title, row in zip(titled, rows, strict=True)
    ]
    key = _TITLE if any(gpu.stranded for gpu in gpus) else 0.0
    width = 2 * _EDGE + columns * column + (columns - 1) * _BETWEEN_COLUMNS
    height = 2 * _EDGE + sum(heights) + (len(rows) - 1) * _BETWEEN_ROWS + key
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    top = _EDGE
    for row, title, row_height in zip(rows, titled, heights, strict=True):
        for number, gpu in enumerate(row):
            left = _EDGE + number * (column + _BETWEEN_COLUMNS)
            _draw(axes, gpu, lines[id(gpu)], left, top, title)
        top += row_height + _BETWEEN_ROWS
    if key:
        _draw_key(axes, height - _EDGE / 2 - key)
    return figure


def _draw(
    axes: Axes, gpu: GpuDrawing, verdict: Sequence[str], left: float, top: float, title: float
) -> None:
    if gpu.title:
        axes.text(left, top, plain(gpu.title), va="top", fontsize=10.5, fontweight="bold")
    top += title
    middle, below = top + _STRIP / 2, top + _STRIP
    taken = {slot for block in gpu.blocks for slot in range(block.start, block.start + block.size)}
    _frame(axes, left, top, gpu.slices * _SLICE, _STRIP)
    for number in range(gpu.slices):
        if number in gpu.stranded:
            _hatch(axes, left + number * _SLICE, top, _SLICE, _STRIP)
        if number not in taken:
            _frame(axes, left + number * _SLICE, top, _SLICE, _STRIP)
        axes.text(
            left + (number + 0.5) * _SLICE,
            below + 0.05,
            str(number),
            ha="center",
            va="top",
            fontsize=8,
            color=SOFT,
        )
    for block in gpu.blocks:
        inset = 0.035
        x, width = left + block.start * _SLICE + inset, block.size * _SLICE - 2 * inset
        axes.add_patch(
            FancyBboxPatch(
                (x, top + inset),
                width,
                _STRIP - 2 * inset,
                boxstyle="round,pad=0,rounding_size=0.05",
                facecolor=profile_colour(block.profile, block.size),
                edgecolor=_LETTERS,
                linewidth=0.8,
            )
        )
        label = block.label or block.profile
        small = min(10.0, 72 * width / (0.62 * max(len(label), 1)) * 0.92)
        axes.text(
            x + width / 2,
            middle,
            plain(label),
            ha="center",
            va="center_baseline",
            fontsize=small,
            color=_LETTERS,
        )
    for number, line in enumerate(verdict):
        axes.text(left, below + _NUMBERS + number * _LINE, plain(line), va="top", color=INK)


def _frame(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor="none", edgecolor=SOFT, linewidth=0.8)
    )


def _hatch(axes: Axes, x: float, y: float, width: float, height: float) -> None:
    axes.add_patch(
        Rectangle(
            (x, y), width, height, facecolor=PAPER, edgecolor=_HATCH, hatch="////", linewidth=0
        )
    )


def _draw_key(axes: Axes, y: float) -> None:
    place = (_EDGE, y + 0.07, 0.36, 0.16)
    _hatch(axes, *place)
    _frame(axes, *place)
    axes.text(_EDGE + 0.46, y + 0.15, "free, but no legal window fits", va="center", color=SOFT)


def _check(gpu: GpuDrawing) -> None:
    name = f"GPU {gpu.title!r}" if gpu.title else "a GPU"
    if gpu.slices < 1:
        raise SlicewiseError(f"{name} cannot be drawn with {gpu.slices} slices")
    taken: set[int] = set()
    for block in gpu.blocks:
        window = set(range(block.start, block.start + block.size))
        if not window or not window <= set(range(gpu.slices)):
            raise SlicewiseError(
                f"{name}: {block.profile} at slice {block.start} leaves slices 0..{gpu.slices - 1}"
            )
        if window & taken:
            raise SlicewiseError(f"{name}: {block.profile} at slice {block.start} overlaps another")
        taken |= window
    if not set(gpu.stranded) <= set(range(gpu.slices)) - taken:
        raise SlicewiseError(f"{name}: a stranded slice must be a free slice of the GPU")
