"""The result of an experiment: its rows, as a table, a drawing or a data frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slicewise.core.errors import SlicewiseError
from slicewise.lab.tables import Row, Table

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

_INTERVAL = "_ci95"


class Drawing:
    """A figure that a notebook shows."""

    def __init__(self, figure: Figure, label: str) -> None:
        self.figure = figure
        """The figure of matplotlib."""
        self._label = label

    def save(self, path: str | Path) -> Path:
        """Write the figure as PNG or SVG, by the suffix."""
        from slicewise.lab.figures.save import save_as

        path = Path(path)
        if path.suffix not in (".png", ".svg"):
            raise SlicewiseError(f"{str(path)!r} must end in .png or .svg")
        return save_as(self.figure, path)

    def _repr_svg_(self) -> str:
        from slicewise.lab.figures.save import svg_text

        return svg_text(self.figure, "result", self._label)

    def __repr__(self) -> str:
        return f"<drawing of {self._label}>"


@dataclass(frozen=True, eq=False)
class Result:
    """The rows of an experiment, with everything that made them."""

    title: str
    """What was asked."""
    settings: Mapping[str, object]
    """The arguments that the rows depend on, the seed among them."""
    rows: tuple[Row, ...]
    """The figures as the command's ``--json`` has them; an interval is named ``..._ci95``."""
    version: str
    """The version of slicewise that made it."""
    notes: tuple[str, ...]
    """What is to be known beside the figures, such as an interruption."""
    _tabulate: Callable[[Sequence[Row]], Table]
    _draw: Callable[[Sequence[Row]], Figure]
    curve: tuple[Row, ...] = ()
    """Of a plan: a row for every cluster that was tried."""

    def table(self) -> Table:
        """Return the figures as the command prints them."""
        return self._tabulate(self.rows)

    def plot(self) -> Drawing:
        """Draw the figures."""
        return Drawing(self._draw(self.rows), self.title)

    def to_arrow(self) -> pa.Table:
        """Return the rows as an Arrow table; an interval is two columns."""
        import pyarrow as pa

        return pa.Table.from_pylist([_flat(row) for row in self.rows])

    def to_pandas(self) -> Any:
        """Return the rows as a data frame of pandas, which must be installed."""
        _require("pandas")
        return self.to_arrow().to_pandas()

    def to_polars(self) -> Any:
        """Return the rows as a data frame of polars, which must be installed."""
        _require("polars")
        return import_module("polars").from_arrow(self.to_arrow())

    def __repr__(self) -> str:
        return "\n".join((self._heading(), str(self.table()), *self.notes))

    def _repr_html_(self) -> str:
        from html import escape

        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p><b>{escape(self._heading())}</b></p>{self.table()._repr_html_()}{notes}"

    def _heading(self) -> str:
        seed = f", seed {self.settings['seed']}" if "seed" in self.settings else ""
        return f"{self.title}{seed} (slicewise {self.version})"


def _flat(row: Row) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in row.items():
        if name.endswith(_INTERVAL):
            low, high = value if isinstance(value, list) else (None, None)
            flat[f"{name}_low"], flat[f"{name}_high"] = low, high
        elif isinstance(value, Mapping):
            flat |= {f"{name}.{key}": each for key, each in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _require(package: str) -> None:
    if find_spec(package) is None:
        raise SlicewiseError(f"{package} is not installed; install it, or use to_arrow()")
