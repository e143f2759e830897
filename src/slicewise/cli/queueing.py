"""The queueing experiment of `simulate`: its options and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from slicewise.cli.output import Row
from slicewise.cli.tables import figures_table, print_table
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.lab.disciplines import WAYS, way
from slicewise.lab.queueing import Queueing
from slicewise.lab.tables import figure_cell, runs_of
from slicewise.lab.tenants import SCENARIOS, scenario

POLICIES = ["least-lost"]
"""The default: the experiment is about disciplines."""

_FIRST_SCENARIO = next(iter(SCENARIOS))


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


ScenarioOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        metavar="NAME",
        help=f"Queueing: {_listed(list(SCENARIOS))}; may be repeated (default: {_FIRST_SCENARIO}).",
    ),
]
DisciplineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--discipline",
        metavar="NAME",
        help=f"Queueing: {_listed(list(WAYS))}; repeat, or separate by commas (default: all).",
    ),
]
PatienceOption = Annotated[
    float | None,
    typer.Option(
        "--patience",
        metavar="X",
        help="Queueing: mean lifetimes until a request gives up; inf is never "
        f"(default {Queueing.patience:g}).",
    ),
]
ReserveAfterOption = Annotated[
    float | None,
    typer.Option(
        "--reserve-after",
        metavar="X",
        help="Queueing: mean lifetimes until a window may be reserved for a request; inf is never "
        f"(default {Queueing.reserve_after:g}).",
    ),
]
ReserveShareOption = Annotated[
    float | None,
    typer.Option(
        "--reserve-share",
        metavar="X",
        help="Queueing: largest share of the GPUs with a reserved window "
        f"(default {Queueing.reserve_share:g}).",
    ),
]


@dataclass(frozen=True)
class QueueingOptions:
    """The options as given; None where not given."""

    scenario: list[str] | None = None
    discipline: list[str] | None = None
    patience: float | None = None
    reserve_after: float | None = None
    reserve_share: float | None = None

    def check_unused(self) -> None:
        """Reject options that would have no effect."""
        for name, value in vars(self).items():
            if value is not None:
                raise SlicewiseError(
                    f"--{name.replace('_', '-')} needs tenants that wait: add --experiment queueing"
                )

    def settings(self, geometry: Geometry) -> dict[str, Any]:
        """Return the settings of the experiment that were given."""
        names = self.scenario or [_FIRST_SCENARIO]
        chosen = self.discipline or list(WAYS)
        disciplines = [name.strip() for given in chosen for name in given.split(",")]
        for kind, given in (("scenario", names), ("discipline", disciplines)):
            twice = next((name for name in given if given.count(name) > 1), None)
            if twice is not None:
                raise SlicewiseError(f"{kind} {twice!r} is named twice")
        scenarios = tuple(scenario(name, geometry) for name in names)
        settings = {
            "mixes": tuple(each.mix for each in scenarios),
            "scenarios": scenarios,
            "ways": tuple(way(name) for name in disciplines),
            "patience": self.patience,
            "reserve_after": self.reserve_after,
            "reserve_share": self.reserve_share,
        }
        return {name: value for name, value in settings.items() if value is not None}


_BY_GROUP = (("mean wait", "mean_wait_lifetimes"), ("gave up %", "gave_up_share"))
_OF_ALL = {
    "95% of waits": ("wait_p95_lifetimes", 100, 1),
    "longest wait": ("longest_wait_lifetimes", 100, 1),
    "false waits %": ("false_wait_share", 100, 1),
    "Jain's index": ("fairness", 1, 3),
    "utilization %": ("utilization_percent", 1, 1),
    "  of that lost": ("lost_percent", 1, 1),
    "attempts a pass": ("attempts_per_pass", 1, 1),
}
_INDENT = {"all": "", "affected": "  of the affected", "tenant": "  ", "profile": "  "}


def print_queueing(experiment: Queueing, rows: list[Row]) -> None:
    """Print a table for each scenario and policy, with a column for each discipline."""
    disciplines = [each.name for each in experiment.ways]
    forever = rows[0]["patience_lifetimes"] is None
    for each in experiment.scenarios:
        for policy in experiment.policies:
            chosen = [
                row for row in rows if row["scenario"] == each.name and row["policy"] == policy.name
            ]
            caption = (
                f"{experiment.gpus} GPUs at load {experiment.load:g}, {runs_of(rows)} runs, "
                + ("waiting for ever" if forever else f"patience {experiment.patience:g}")
                + "; waits in % of the mean lifetime; ± is a 95% interval over runs"
            )
            table = figures_table(disciplines, caption)
            table.add_row(Text(f"{each.name}, {policy.name}", "bold"))
            columns = [
                {(row["group"], row["name"]): row for row in chosen if row["discipline"] == name}
                for name in disciplines
            ]
            for heading, figure in _BY_GROUP:
                for group in columns[0]:
                    kind, name = group
                    if kind == "affected" and not each.affected:
                        continue
                    label = heading if kind == "all" else f"{_INDENT[str(kind)]}{name or ''}"
                    cells = (figure_cell(column[group], figure, 100, 1) for column in columns)
                    table.add_row(Text(label), *cells)
            for label, (figure, scale, digits) in _OF_ALL.items():
                cells = (
                    figure_cell(column["all", None], figure, scale, digits) for column in columns
                )
                table.add_row(Text(label), *cells)
            print_table(table, Console())
