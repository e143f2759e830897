"""Prints GPU models: the list of them, and the slice map of one.

All text is printed as Rich ``Text``, never as markup, because names and notes may come from a
user's file. Bars differ by character, not only by colour, so nothing is lost in a pipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slicewise.catalog import Catalog, CatalogEntry, Confidence, ProfileFacts
from slicewise.cli.tables import print_table
from slicewise.core.geometry import Geometry, Profile

Json = dict[str, object]

_Column = tuple[str, bool, Sequence[str]]
"""Title, whether it is numeric, values."""


def list_models(catalog: Catalog, console: Console) -> None:
    """Print a table of all models, then the reasons why some cannot be scheduled."""
    # At 80 columns, the longest name leaves room for one blank between columns.
    table = _table(gap=1 if console.width < 90 else 2)
    table.add_column("\nModel", no_wrap=True)
    table.add_column("Memory\nslices", justify="right")
    table.add_column("Compute\nslices", justify="right")
    table.add_column("\nProfiles", justify="right")
    table.add_column("Profiles\nknown", no_wrap=True)
    table.add_column("Placements\nknown", no_wrap=True)
    table.add_column("\nUsable")
    refused = []
    for entry in catalog.entries():
        known = entry.confidence
        table.add_row(
            Text(entry.model),
            str(entry.memory_slices),
            str(entry.compute_slices),
            str(len(entry.facts)),
            known.profiles if known else "unstated",
            known.placements if known else "unstated",
            "yes" if entry.refusal is None else Text("no", "bold red"),
        )
        if entry.refusal is not None:
            refused.append(f"{entry.model} cannot be scheduled: {entry.refusal}.")
    print_table(table, console)
    for reason in refused:
        console.print()
        _say(console, reason)


def models_as_json(catalog: Catalog) -> list[Json]:
    """Return the data of ``list_models`` for JSON."""
    return [_summary(entry) for entry in catalog.entries()]


def draw_model(entry: CatalogEntry, console: Console) -> None:
    """Print one model: the placements of its profiles, its hardware facts and their sources."""
    console.print(Text(entry.model, "bold"))
    figures = [
        entry.architecture,
        f"{entry.memory_gb:g} GB" if entry.memory_gb else "",
        _many(entry.memory_slices, "memory slice"),
        _many(entry.compute_slices, "compute slice"),
    ]
    _say(console, ", ".join(filter(None, figures)))
    if entry.aliases:
        _say(console, f"Also called: {', '.join(entry.aliases)}")
    console.print()
    if entry.geometry is None:
        _say(console, f"Cannot be scheduled: {entry.refusal}.", "bold red")
    else:
        _draw_map(entry.geometry, console)
    console.print()
    print_table(_profile_table(entry), console)
    _show_hardware(entry.facts, console)
    if entry.geometry is not None and entry.geometry.budgets:
        title = "Budgets: the instances of a GPU together may take no more than the total"
        _show_list(console, title, _budget_words(entry.geometry))
    _show_list(console, "Confidence", _confidence_words(entry.confidence))
    _show_list(console, "Notes", entry.notes)
    _show_list(console, "Sources", entry.sources)


def model_as_json(entry: CatalogEntry) -> Json:
    """Return the data of ``draw_model`` for JSON."""
    geometry = entry.geometry
    budgets = geometry.budgets if geometry else ()
    return {
        **_summary(entry),
        "pci_device_ids": list(entry.pci_device_ids),
        "budgets": [{"name": budget.name, "total": budget.total} for budget in budgets],
        "profiles": [
            {**asdict(facts), **_placing(geometry.profile(facts.name) if geometry else None)}
            for facts in entry.facts
        ],
        "notes": list(entry.notes),
        "sources": list(entry.sources),
    }


def _summary(entry: CatalogEntry) -> Json:
    return {
        "model": entry.model,
        "aliases": list(entry.aliases),
        "architecture": entry.architecture,
        "memory_gb": entry.memory_gb,
        "memory_slices": entry.memory_slices,
        "compute_slices": entry.compute_slices,
        "profiles": [facts.name for facts in entry.facts],
        "confidence": None
        if entry.confidence is None
        else {part: str(level) for part, level in vars(entry.confidence).items()},
        "schedulable": entry.refusal is None,
        "refusal": entry.refusal,
    }


def _placing(profile: Profile | None) -> Json:
    """Return the starts and uses of a profile; all None if unknown."""
    if profile is None:
        return {"starts": None, "preferred": None, "uses": None}
    return {
        "starts": list(profile.starts),
        "preferred": list(profile.start_order),
        "uses": dict(profile.uses),
    }


def _draw_map(geometry: Geometry, console: Console) -> None:
    """Print the slices as columns and, below, a bar for every legal placement of a profile."""
    names = max(len("slice"), *(len(profile.name) for profile in geometry.profiles))
    room = (console.width - names - 2) // geometry.slices
    cell = max(2, min(4, room))
    header = "".join(str(i % 100).center(cell - 1) + " " for i in range(geometry.slices))
    _draw_line(console, Text.assemble("slice".ljust(names + 2), (header.rstrip(), "bold")))
    plain, variant = ("#", "=") if console.options.ascii_only else ("█", "▒")
    for profile in geometry.profiles:
        block, style = (plain, "cyan") if profile.variant_of is None else (variant, "blue")
        label = profile.name
        for lane in lanes(profile):
            line, reached = Text(label.ljust(names + 2)), 0
            for start in lane:
                width = profile.size * cell - 1
                line.append(" " * (start * cell - reached))
                line.append(block * width, style)
                reached = start * cell + width
            _draw_line(console, line)
            label = ""
    legend = "Each bar is a placement that an instance may take"
    if len(geometry.plain_profiles) < len(geometry.profiles):
        legend += f"; {variant * 2} marks variants of a plain profile"
    console.print()
    _say(console, f"{legend}.", "dim")


def lanes(profile: Profile) -> list[list[int]]:
    """Return the profile's starts in rows without overlapping windows."""
    rows: list[list[int]] = []
    for start in profile.starts:
        for row in rows:
            if row[-1] + profile.size <= start:
                row.append(start)
                break
        else:
            rows.append([start])
    return rows


def _profile_table(entry: CatalogEntry) -> Table:
    """Return a table of the profiles; empty columns are omitted."""
    geometry = entry.geometry
    profiles = [geometry.profile(facts.name) if geometry else None for facts in entry.facts]
    driver = any(p.preferred for p in profiles if p)
    columns: list[_Column] = [
        ("Profile", False, [facts.name for facts in entry.facts]),
        ("Size", True, [str(facts.size) for facts in entry.facts]),
        ("Compute", True, [str(facts.compute) for facts in entry.facts]),
        ("Memory", True, [_gigabytes(facts.memory_gb) for facts in entry.facts]),
        ("Max", True, [_figure(facts.max_instances) for facts in entry.facts]),
        ("Starts", False, [_starts(p.starts) if p else "not known" for p in profiles]),
        ("Driver tries", False, [_starts(p.start_order) if p and driver else "" for p in profiles]),
        ("Variant of", False, [facts.variant_of or "" for facts in entry.facts]),
    ]
    return _columns(columns)


def _show_hardware(facts: Sequence[ProfileFacts], console: Console) -> None:
    """Print ids and engines, if any are known."""
    columns: list[_Column] = [
        ("ID", True, [_figure(f.id) for f in facts]),
        ("NVML", True, [_figure(f.nvml_enum) for f in facts]),
        ("SMs", True, [_figure(f.sm_count) for f in facts]),
        ("Memory", True, [_reported_memory(f) for f in facts]),
    ]
    for engine in ("copy", "decoder", "encoder", "jpeg", "ofa"):
        values = [_figure(getattr(f.engines, engine)) if f.engines else "" for f in facts]
        columns.append((engine, True, values))
    if any(any(values) for _, _, values in columns):
        console.print()
        print_table(_columns([("Profile", False, [f.name for f in facts]), *columns]), console)


def _budget_words(geometry: Geometry) -> list[str]:
    """Describe each budget in a sentence: its total, and what each profile takes."""
    sentences = []
    for budget in geometry.budgets:
        takers: dict[int, list[str]] = {}
        for profile in geometry.profiles:
            amount = profile.uses.get(budget.name, 0)
            if amount:
                takers.setdefault(amount, []).append(profile.name)
        parts = [f"{_listed(names)} {_take(names)} {n}" for n, names in sorted(takers.items())]
        words = "; ".join(parts) if parts else "no profile takes any"
        if set(takers) == {budget.total}:
            words += ", so there is at most one such instance"
        sentences.append(f"{budget.name}, {budget.total} in all: {words}.")
    return sentences


def _confidence_words(confidence: Confidence | None) -> list[str]:
    if confidence is None:
        return ["The file does not state how well its figures are known."]
    return [
        f"profiles {confidence.profiles}, placements {confidence.placements}, "
        f"engines {confidence.engines}"
    ]


def _columns(columns: Iterable[_Column]) -> Table:
    """Return a table of the columns that are not empty."""
    filled = [column for column in columns if any(column[2])]
    table = _table(gap=2)
    for title, figures, _ in filled:
        table.add_column(title, justify="right" if figures else "left", no_wrap=figures)
    for row in zip(*(values for _, _, values in filled), strict=True):
        table.add_row(*map(Text, row))
    return table


def _table(gap: int) -> Table:
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")


def _show_list(console: Console, title: str, items: Iterable[str]) -> None:
    """Print a titled list with wrapped items; nothing if it is empty."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for item in items:
        grid.add_row("-", Text(item))
    if grid.row_count:
        console.print()
        console.print(Text(title, "bold"))
        console.print(grid)


def _say(console: Console, words: str, style: str = "") -> None:
    console.print(Text(words, style))


def _draw_line(console: Console, line: Text) -> None:
    """Print a line of the map without wrapping."""
    console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _many(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _figure(number: int | None) -> str:
    return "" if number is None else str(number)


def _gigabytes(number: float) -> str:
    return f"{number:g} GB" if number else ""


def _reported_memory(facts: ProfileFacts) -> str:
    if facts.memory_mib is not None:
        return f"{facts.memory_mib:g} MiB"
    return "" if facts.memory_gib is None else f"{facts.memory_gib:g} GiB"


def _starts(starts: Sequence[int]) -> str:
    return " ".join(map(str, starts))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _take(names: Sequence[str]) -> str:
    return "takes" if len(names) == 1 else "each take"
