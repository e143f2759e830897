"""The style of drawings: one colour, marker and line style per policy.

The colours are those of Okabe and Ito, which colour-blind people can distinguish. Markers and line
styles differ as well, so that nothing depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from matplotlib import style
from matplotlib.axes import Axes

INK = "#1f2733"
SOFT = "#566272"
GRID = "#dde2e9"
PAPER = "#ffffff"

THEME = {INK: "ink", SOFT: "soft", GRID: "grid", PAPER: "paper"}
"""The neutral colours and the names by which a page may replace them."""

Line = str | tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class PolicyStyle:
    """The style of a policy in every drawing."""

    colour: str
    marker: str
    line: Line
    hatch: str = ""
    hollow: bool = False

    @property
    def marker_face(self) -> str:
        """The fill colour of its markers."""
        return PAPER if self.hollow else self.colour


_STYLES = {
    "mfi": PolicyStyle("#0072b2", "o", "-"),
    "best-fit": PolicyStyle("#009e73", "s", "--"),
    "worst-fit": PolicyStyle("#e69f00", "^", "-."),
    "first-fit": PolicyStyle("#56b4e9", "D", ":"),
    "round-robin": PolicyStyle("#cc79a7", "v", (0, (5, 1, 1, 1, 1, 1))),
    "mfi-overlap": PolicyStyle("#d55e00", "P", (0, (8, 2))),
    "least-lost": PolicyStyle("#332288", "X", "-"),
    # The limit is not a policy: grey and dotted to look different from all of them.
    "oracle": PolicyStyle(SOFT, "_", (0, (1, 2)), hatch="....", hollow=True),
}

_ALSO_CALLED = {
    "bf-bi": "best-fit",
    "wf-bi": "worst-fit",
    "ff": "first-fit",
    "rr": "round-robin",
}
"""The paper's names."""

_STRICT = "-strict"

_OTHER_COLOURS = ("#44aa99", "#999933", "#cc6677", "#7b68c8", "#8a8f98", "#a0784c")
_OTHER_MARKERS = ("X", "p", "*", "h", "<", ">", "d")
_OTHER_LINES: tuple[Line, ...] = ("-", "--", "-.", (0, (3, 1, 1, 1)))


def policy_style(name: str) -> PolicyStyle:
    """Return the style of a policy; an unknown policy gets a stable style from its name."""
    key = name.lower()
    base = _ALSO_CALLED.get(key, key)
    known = _STYLES.get(base.removesuffix(_STRICT))
    if known is not None:
        return replace(known, hatch="////", hollow=True) if base.endswith(_STRICT) else known
    number = crc32(key.encode())
    return PolicyStyle(
        _OTHER_COLOURS[number % len(_OTHER_COLOURS)],
        _OTHER_MARKERS[number // 7 % len(_OTHER_MARKERS)],
        _OTHER_LINES[number // 49 % len(_OTHER_LINES)],
    )


_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelsize": 9.5,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.facecolor": PAPER,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "text.usetex": False,
    "axes.unicode_minus": True,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "hatch.linewidth": 0.8,
    "svg.fonttype": "path",
}


def house_style(**settings: Any) -> AbstractContextManager[None]:
    """Return a context manager that applies the style to everything drawn inside it."""
    return style.context(["default", {**_RC, **settings}])


def light_grid(axes: Axes) -> None:
    """Draw thin horizontal lines behind the data."""
    axes.grid(True, axis="y", which="major")
    axes.tick_params(axis="y", which="both", length=0)
    axes.spines["left"].set_visible(False)


def plain(text: str) -> str:
    """Escape text: a dollar sign does not start a formula."""
    return text.replace("$", r"\$")


def tick(distribution: str) -> str:
    """Format a distribution's name for an axis; a custom one has a line per profile."""
    return plain(distribution).replace(",", ",\n")


def legend_columns(names: Sequence[str], width: float) -> int:
    """Return how many names fit side by side in a legend of this width in inches."""
    longest = max(map(len, names), default=0)
    return max(1, min(len(names), int(width / (0.08 * longest + 0.6))))


def note_nothing_measured(axes: Axes) -> None:
    """Write into an empty panel that nothing was measured."""
    axes.text(
        0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=SOFT
    )
