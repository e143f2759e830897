"""Prints a plan: a table with the GPUs each policy needs and the GPUs it saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from slicewise.cli.output import Row
from slicewise.cli.tables import figures_table, print_table
from slicewise.lab.experiment import ORACLE


@dataclass(frozen=True)
class Planned:
    """The results of a plan."""

    title: str
    setting: Row
    """The question, and the demand or trace."""
    rows: Sequence[Row]
    """One per policy."""
    curve: Sequence[Row]
    """One per cluster tried."""
    notes: Sequence[str] = ()
    """The rows of the trace that were skipped."""


_DRAWN = ("GPUs", "95%", "load", "rejected %", "saved", "95%", "saved %", "above")
_RECORDED = ("GPUs", "chance", "load", "rejected", "rejected %", "saved", "saved %")


def print_plan(planned: Planned) -> None:
    """Print a plan."""
    console = Console(highlight=False, markup=False)
    recorded = "trace" in planned.setting
    for line in _heading(planned, recorded):
        console.print(line, soft_wrap=True)
    widest = max(len(str(row["policy"])) for row in planned.rows) + 2
    table = figures_table(_RECORDED if recorded else _DRAWN, max_width=max(widest, 24))
    cells = _trace_cells if recorded else _demand_cells
    share = "rejected_share" if planned.setting["count"] == "requests" else "rejected_slices_share"
    for distribution in dict.fromkeys(row.get("distribution") for row in planned.rows):
        if distribution is not None:
            table.add_row(Text(str(distribution), "bold"))
        for row in planned.rows:
            if row.get("distribution") == distribution:
                indent = "" if distribution is None else "  "
                table.add_row(Text(f"{indent}{row['policy']}"), *cells(row, share))
    print_table(table, console)
    for line in _footing(planned, recorded, share):
        console.print(line, soft_wrap=True)


def _heading(planned: Planned, recorded: bool) -> Iterator[str]:
    setting = planned.setting
    step = "" if setting["step"] == 1 else f", in steps of {setting['step']} GPUs"
    yield f"{planned.title}{step}"
    if not recorded:
        yield f"{setting['runs']} runs, the same requests for every cluster"
        return
    compress, scale = setting["compress"], setting["scale"]
    parts = [f"{setting['arrivals']} requests, {_number(setting['offered_gpus']):.1f} GPUs' worth"]
    if setting["preplaced"]:
        parts.append(f"{setting['preplaced']} placed beforehand")
    if scale is not None:
        parts.append(f"shares x {scale:g}")
    if compress != 1:
        parts.append(f"arrivals compressed {compress:g} times")
    yield ", ".join(parts)


def _demand_cells(row: Row, share: str) -> Iterator[str]:
    yield _whole(row["needed_gpus"])
    yield _span(row["needed_gpus_ci95"], "-")
    yield _decimals(row["load"], 2)
    yield _percent(row[share])
    yield _whole(row["saved_gpus"])
    yield _span(row["saved_gpus_ci95"], " to ")
    yield _decimals(row["saved_percent"], 1)
    yield _whole(row["above_limit_gpus"])


def _trace_cells(row: Row, share: str) -> Iterator[str]:
    first, needed = row["first_gpus"], row["needed_gpus"]
    yield _whole(needed)
    yield "-" if first == needed else _span([first, needed], "-")
    yield _decimals(row["load"], 2)
    yield _whole(row["rejected"])
    yield _percent(row[share])
    yield _whole(row["saved_gpus"])
    yield _decimals(row["saved_percent"], 1)


def _footing(planned: Planned, recorded: bool, share: str) -> Iterator[str]:
    rows = planned.rows
    reference = rows[0]["compared_with"]
    if recorded:
        yield (
            "GPUs: this size and every larger one tried meet the target; chance: in this range, "
            f"some do and some do not; saved: beside {reference}"
        )
    else:
        yield (
            f"95%: intervals over the runs; saved: beside {reference}, paired; "
            "above: more than the limit needs"
        )
    for row in rows:
        if row["needed_gpus"] is None:
            tried = [
                point
                for point in planned.curve
                if all(point.get(name) == row.get(name) for name in ("policy", "distribution"))
            ]
            yield (
                f"{row['policy']}: even {tried[-1]['gpus']} GPUs, as many as there are instances "
                f"at most, do not meet the target: it rejects {_percent(tried[-1][share])}%"
            )
    for missing in dict.fromkeys(row["oracle_missing"] for row in rows):
        if missing is not None:
            yield f"{ORACLE}: {missing}"
    yield from planned.notes


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return value


def _whole(value: object) -> str:
    return "-" if value is None else f"{value}"


def _decimals(value: object, digits: int) -> str:
    return "-" if value is None else f"{_number(value):.{digits}f}"


def _percent(share: object) -> str:
    return "-" if share is None else f"{100 * _number(share):.3g}"


def _span(ends: object, between: str) -> str:
    if not isinstance(ends, list):
        return "-"
    low, high = ends
    return _whole(low) if low == high else f"{_whole(low)}{between}{_whole(high)}"
