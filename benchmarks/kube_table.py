"""Print the results of the streams: each stream, and both sides next to each other.

    .venv/bin/python -m benchmarks.kube_table FILE [--markdown]

prints the tables of saved results.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Column = tuple[str, str, float, str]
"""Heading, key of the row, factor, and format."""

_AGED: tuple[Column, ...] = (
    ("running", "running", 1, "8.1f"),
    ("slices %", "slices_share", 100, "9.1f"),
    ("gave up %", "gave_up_share", 100, "10.1f"),
    ("stuck %", "stuck_share", 100, "8.1f"),
    ("stranded %", "stranded_share", 100, "11.1f"),
    ("F", "fragmentation", 1, "8.3f"),
)
_OPEN: tuple[Column, ...] = (
    ("running", "running", 1, "8.1f"),
    ("slices %", "slices_share", 100, "9.1f"),
    ("waiting", "pending", 1, "8.1f"),
    ("stuck", "stuck", 1, "7.1f"),
    ("stranded", "stranded", 1, "9.1f"),
    ("F", "fragmentation", 1, "8.3f"),
    ("ran %", "ran_share", 100, "7.1f"),
    ("p50 s", "p50", 1, "7.2f"),
    ("p90 s", "p90", 1, "7.2f"),
    ("burst/s", "burst", 1, "8.2f"),
    ("scheduler", "scheduler_cpu", 1, "10.2f"),
)


def tell_stream(found: Row) -> Iterator[str]:
    """Summarize one stream in a line."""
    stream = found["stream"]
    for part in ("aged", "together"):
        one, foretold = found[part], found["forecast"][part]
        yield (
            f"{part}: {one['running']:.0f} running, {100 * one['slices_share']:.1f}% of slices, "
            f"{one['gave_up']:.0f} of {one['came']:.0f} gave up ({one['stuck']:.0f} stuck, "
            f"{one['stranded']:.0f} stranded, {one['overlooked']:.0f} overlooked), "
            f"F {one['fragmentation']:.3f}; free: {one['usable']:.0f} usable, "
            f"{one['spent']:.0f} without compute, {one['blocked']:.0f} blocked"
        )
        yield (
            f"{part}, foretold: {foretold['running']:.0f} running, "
            f"{100 * foretold['slices_share']:.1f}% of slices, "
            f"{100 * foretold['gave_up_share']:.1f}% gave up "
            f"(here {100 * one['gave_up_share']:.1f}%), F {foretold['fragmentation']:.3f}"
        )
    for name, label in (("to_running", "all"), ("to_running_room_kept", "room kept")):
        if stream[name]:
            times = "/".join(f"{seconds:.2f}" for seconds in stream[name].values())
            yield f"open: to running {times} s ({label}; p50, p90, p99, most)"
    yield (
        f"open: {stream['running']:.0f} running, {100 * stream['slices_share']:.1f}% of slices, "
        f"{stream['pending']:.1f} waiting, {stream['stuck']:.1f} stuck "
        f"({stream['stranded']:.1f} stranded), F {stream['fragmentation']:.3f}; "
        f"{stream['ran']} of {stream['known']} ran, {stream['had_room_and_ran']} of "
        f"{stream['had_room']} that had room (taken by older {stream['lost_room_to_older']}, "
        f"younger {stream['lost_room_to_younger']})"
    )
    if found["overlaps"]:
        yield f"{found['overlaps']} OVERLAPS"


def table(streams: Sequence[Row], markdown: bool = False) -> Iterator[str]:
    """Yield the means of both sides over the seeds, then the differences by seed."""
    for title, columns, of in _PARTS:
        yield ""
        if markdown:
            yield (
                "".join(f"| {head} " for head in ("distribution", "", *(c[0] for c in columns)))
                + "|"
            )
            yield "| --- " * (2 + len(columns)) + "|"
        else:
            heads = "".join(f"{head:>{_width(form)}}" for head, _, _, form in columns)
            yield f"{title}\n{'':12}{'load':>5} {'':16}{heads}"
        for mix, load, label, cells in _rows(streams, columns, of):
            shown = [
                "-" if value is None else format(times * value, form)
                for (_, _, times, form), value in zip(columns, cells, strict=True)
            ]
            if markdown:
                yield "".join(f"| {cell.strip()} " for cell in (mix, label, *shown)) + "|"
            else:
                aligned = (
                    f"{cell:>{_width(form)}}"
                    for cell, (_, _, _, form) in zip(shown, columns, strict=True)
                )
                yield f"{mix:12}{load:>5} {label:16}{''.join(aligned)}"


def _rows(
    streams: Sequence[Row], columns: Sequence[Column], of: Callable[[Row], Row]
) -> Iterator[tuple[str, str, str, list[float | None]]]:
    """Yield rows of distribution, load, side or difference, and values."""
    for mix, load, sides in pairs(streams):
        for side, rows in sides.items():
            cells = [_mean(of(row)[key] for row in rows) for _, key, _, _ in columns]
            yield mix, f"{load:.2f}", side, cells
        differences = [
            [
                of(ours)[key] - of(theirs)[key]
                for theirs, ours in both(sides)
                if None not in (of(ours)[key], of(theirs)[key])
            ]
            for _, key, _, _ in columns
        ]
        number = len(both(sides))
        for label, choose in (("difference", statistics.fmean), ("least", min), ("most", max)):
            if number > (label != "difference"):
                cells = [choose(found) if found else None for found in differences]
                yield "", "", label, cells


def _width(form: str) -> int:
    return int(form.partition(".")[0])


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def pairs(streams: Sequence[Row]) -> Iterator[tuple[str, float, dict[str, list[Row]]]]:
    """Group the streams of each side by distribution and load."""
    found: dict[tuple[str, float], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for stream in streams:
        found[stream["mix"], stream["load"]][stream["side"]].append(stream)
    for (mix, load), sides in found.items():
        yield mix, load, sides


def both(sides: dict[str, list[Row]]) -> list[tuple[Row, Row]]:
    """Pair the streams of stock and slicewise with the same seed."""
    ours = {row["seed"]: row for row in sides.get("slicewise", ())}
    return [(row, ours[row["seed"]]) for row in sides.get("stock", ()) if row["seed"] in ours]


def open_row(row: Row) -> Row:
    """Return the figures of the open stream that the table shows."""
    stream: Row = row["stream"]
    times = stream["to_running"] or {"p50": None, "p90": None}
    return {
        **stream,
        **times,
        "ran_share": stream["ran"] / stream["known"] if stream["known"] else None,
        "burst": row["burst"]["pods_per_second"],
    }


_PARTS: tuple[tuple[str, tuple[Column, ...], Callable[[Row], Row]], ...] = (
    ("some nodes at a time, all the time that is needed", _AGED, lambda row: row["aged"]),
    ("foretold by the simulator", _AGED, lambda row: row["forecast"]["aged"]),
    ("all nodes, all the time that is needed", _AGED, lambda row: row["together"]),
    ("foretold by the simulator", _AGED, lambda row: row["forecast"]["together"]),
    ("all nodes, by the real clock", _OPEN, open_row),
)


def main() -> None:
    """Print the tables of a results file."""
    parser = argparse.ArgumentParser(description="The tables of benchmarks/kube_bench.py")
    parser.add_argument("file", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    print("\n".join(table(json.loads(options.file.read_text())["streams"], options.markdown)))


if __name__ == "__main__":
    main()
