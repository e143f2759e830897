"""`slicewise score`: compute the fragmentation score of a GPU, profile by profile."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slicewise.cli.choices import chosen_geometry
from slicewise.cli.options import AsJson, GeometryFiles, ModelName
from slicewise.cli.output import as_json
from slicewise.cli.tables import print_table
from slicewise.core.compute_fragmentation import (
    ComputeReading,
    Use,
    compute_score_by_profile,
    uses,
)
from slicewise.core.fragmentation import (
    Reading,
    blocked_starts,
    free_slices,
    is_fragmented,
    score_by_profile,
)
from slicewise.core.fragmentation import score as fragmentation_score
from slicewise.core.geometry import Geometry


def score(
    mask: Annotated[
        str, typer.Argument(help="Occupied slices as 0 and 1, slice 0 first: 11000100 is {0,1,5}.")
    ],
    model: ModelName = None,
    geometry: GeometryFiles = None,
    json: AsJson = False,
) -> None:
    """Compute the fragmentation score F of a GPU, under every reading, profile by profile."""
    chosen = chosen_geometry(model, geometry)
    occupied = chosen.mask(mask)
    if json:
        typer.echo(as_json(_document(chosen, occupied)), nl=False)
    else:
        _print(chosen, occupied)


def _document(geometry: Geometry, mask: int) -> dict[str, object]:
    return {
        "model": geometry.model,
        "mask": geometry.mask_text(mask),
        "score": {str(r): fragmentation_score(geometry, mask, r) for r in Reading},
        "free_slices": free_slices(geometry, mask),
        "by_profile": {
            profile.name: {
                "size": profile.size,
                "fits_by_size": profile.size <= free_slices(geometry, mask),
                "fragmented": is_fragmented(geometry, profile, mask),
                **{
                    str(reading): {
                        "score": score_by_profile(geometry, mask, reading)[profile.name],
                        "blocked_starts": list(blocked_starts(geometry, profile, mask, reading)),
                    }
                    for reading in Reading
                },
            }
            for profile in geometry.plain_profiles
        },
        "compute_slices": [
            {
                "used": use.compute,
                **{str(reading): _in_compute(geometry, use, reading) for reading in ComputeReading},
            }
            for use in uses(geometry, mask)
        ],
    }


def _in_compute(geometry: Geometry, use: Use, reading: ComputeReading) -> dict[str, object]:
    added = compute_score_by_profile(geometry, use, reading)
    return {"score": sum(added.values()), "by_profile": added}


def _print(geometry: Geometry, mask: int) -> None:
    console = Console(highlight=False)
    free = free_slices(geometry, mask)
    slices = " ".join(f"{i:>2}" for i in range(geometry.slices))
    taken = " ".join(" #" if mask >> i & 1 else " ." for i in range(geometry.slices))
    console.print(f"{geometry.model}, {free} of {geometry.slices} slices free\n")
    console.print(f"slice  {slices}\ntaken  {taken}\n")
    table = Table(box=None, pad_edge=False)
    table.add_column("\nProfile", no_wrap=True)
    table.add_column("\nSize", justify="right")
    table.add_column("Legal\nstarts")
    for reading in Reading:
        table.add_column(f"Blocked\n{reading}")
        table.add_column("\nadds", justify="right", no_wrap=True)
    table.add_column("Can be\nplaced", no_wrap=True)
    for profile in geometry.plain_profiles:
        cells = [profile.name, str(profile.size), _list(profile.starts)]
        for reading in Reading:
            blocked = blocked_starts(geometry, profile, mask, reading)
            product = f"{len(blocked)}x{profile.size} = {len(blocked) * profile.size}"
            cells += [_list(blocked) if blocked else "-", product if blocked else "0"]
        if profile.size > free:
            verdict = "no: too large"
        elif is_fragmented(geometry, profile, mask):
            verdict = "no: fragmented"
        else:
            verdict = "yes"
        table.add_row(*map(Text, [*cells, verdict]))
    table.add_section()
    totals = {r: str(fragmentation_score(geometry, mask, r)) for r in Reading}
    table.add_row("F", "", "", "", totals[Reading.PARTIAL], "", totals[Reading.OVERLAP], "")
    print_table(table, console)
    console.print(
        "\npartial counts windows with both free and taken slices (the paper's example); "
        "overlap counts every window with a taken slice (its Algorithm 1). A profile larger than "
        "the free slices is not counted."
    )
    _print_compute(console, geometry, mask)


def _print_compute(console: Console, geometry: Geometry, mask: int) -> None:
    """F in compute slices, for each number of them that instances on these slices may use."""
    possible = uses(geometry, mask)
    if not possible:
        console.print("\nNo instances occupy exactly these slices: F in compute slices is unknown.")
        return
    table = Table(box=None, pad_edge=False, title="F in compute slices", title_justify="left")
    table.add_column("Used", no_wrap=True)
    for reading in ComputeReading:
        table.add_column(str(reading), justify="right", no_wrap=True)
    table.add_column("added under compute, by profile")
    for use in possible:
        scores = [compute_score_by_profile(geometry, use, reading) for reading in ComputeReading]
        parts = ", ".join(f"{name} {added}" for name, added in scores[0].items() if added)
        totals = [str(sum(added.values())) for added in scores]
        table.add_row(f"{use.compute} of {geometry.compute}", *totals, Text(parts or "-"))
    console.print(
        "\nBy compute slices, a profile counts if its compute slices fit in the free ones. It adds "
        "them for every window with a taken memory slice, if a compute slice behind the window is "
        "free (compute), or that or a memory slice in it (either).\n"
    )
    print_table(table, console)


def _list(starts: tuple[int, ...]) -> str:
    return ",".join(map(str, starts))
