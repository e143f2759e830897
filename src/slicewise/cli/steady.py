"""The steady experiment of `simulate`: lifetimes, drift, and the table of a drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.text import Text

from slicewise.cli.output import Row
from slicewise.cli.tables import figures_table, print_table
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.lab.mix import Mix, parse_mix
from slicewise.lab.sustained import DriftKind, Knowledge, LifetimeLaw, drift
from slicewise.lab.tables import figure_cell, runs_of

WINDOWS = 8
"""The parts of the measured time that a drift is shown in."""

LifetimesOption = Annotated[
    LifetimeLaw | None,
    typer.Option(
        "--lifetimes",
        help="Steady: how lifetimes of the same mean are distributed (default: uniform).",
    ),
]
LeasesOption = Annotated[
    Knowledge | None,
    typer.Option(
        "--leases",
        help="Steady: what is said of lifetimes (default: exact to lease-aware, none to others). "
        "early: they leave up to half early; classes: short, medium or long; wrong, half: wrong or "
        "unknown for half.",
    ),
]
DriftOption = Annotated[
    DriftKind | None,
    typer.Option(
        "--drift",
        help="Steady: the mix changes within a run, at once or gradually to another one; or its "
        "largest profile appears, or vanishes and returns.",
    ),
]
DriftToOption = Annotated[
    str | None,
    typer.Option(
        "--drift-to",
        metavar="NAME",
        help="Steady: the mix that a sudden or gradual drift leads to (default: probabilities of "
        "large and small profiles swapped).",
    ),
]


@dataclass(frozen=True)
class SteadyOptions:
    """The options as given; None where not given."""

    lifetimes: LifetimeLaw | None = None
    leases: Knowledge | None = None
    drift: DriftKind | None = None
    drift_to: str | None = None

    def check_unused(self) -> None:
        """Reject options that would have no effect."""
        for name, value in vars(self).items():
            if value is not None:
                raise SlicewiseError(f"--{name.replace('_', '-')} needs --experiment steady")

    def settings(self, mixes: tuple[Mix, ...], geometry: Geometry) -> dict[str, Any]:
        """Return the settings of the experiment that were given."""
        settings: dict[str, Any] = {}
        if self.lifetimes is not None:
            settings["law"] = self.lifetimes
        if self.leases is not None:
            settings["leases"] = self.leases
        if self.drift is None:
            if self.drift_to is not None:
                raise SlicewiseError("--drift-to needs --drift sudden or --drift gradual")
            return settings
        to = None if self.drift_to is None else parse_mix(self.drift_to, geometry)
        drifts = tuple(drift(self.drift, mix, to) for mix in mixes)
        # The experiment counts requests by their place in the mix that has all profiles.
        settings |= {"mixes": tuple(each.first for each in drifts), "drift": drifts}
        return settings | {"windows": WINDOWS}


def print_drift(rows: list[Row]) -> None:
    """Print rejections by part of the measured time, and differences to the first policy."""
    parts = [f"{number + 1}/{WINDOWS}" for number in range(WINDOWS)]
    first = rows[0]["compared_with"]
    columns = {part: (part, 100.0, 2) for part in parts}
    for figure, title in (
        ("rejected_share", "rejected % by part of the run"),
        ("rejected_share_difference", f"more than {first}, paired"),
    ):
        table = figures_table(
            columns, f"{title}; {runs_of(rows)} runs; ± is a 95% interval over runs"
        )
        for distribution in dict.fromkeys(str(row["distribution"]) for row in rows):
            table.add_row(Text(distribution.replace(",", ",\n"), "bold"))
            for row in rows:
                windows = cast("list[Row]", row["windows"])
                if row["distribution"] != distribution or not windows:
                    continue
                cells: dict[str, object] = {}
                for part, window in zip(parts, windows, strict=True):
                    cells[part] = window[figure]
                    cells[f"{part}_ci95"] = window[f"{figure}_ci95"]
                table.add_row(
                    Text(f"  {row['policy']}"),
                    *(figure_cell(cells, *column) for column in columns.values()),
                )
        print_table(table, Console())
