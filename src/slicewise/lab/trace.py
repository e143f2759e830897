"""Reads recorded requests from a CSV file and maps them to a GPU model.

`read_trace` returns typed rows, independent of GPU models; `fit` maps them to the profiles of one
model. A malformed row is skipped and listed with its line and the reason, or is an error in strict
mode. docs/traces.md describes the two formats.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TextIO

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.request import Need, Request

WHOLE = 1000
"""A whole GPU, in thousandths."""

_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,9})?")
_INTEGER = re.compile(r"[0-9]{1,9}")
_LONGEST_LINE = 1 << 20
"""Longer lines are read in pieces, which bounds the memory for a file without line breaks."""
_MOST_INSTANCES = 100_000


class TraceFormat(StrEnum):
    """The names of the formats."""

    ALIBABA = "alibaba-2023"
    PLAIN = "plain"


_REQUIRED = {
    TraceFormat.ALIBABA: ("num_gpu", "gpu_milli", "creation_time", "deletion_time"),
    TraceFormat.PLAIN: ("arrival", "lifetime"),
}


@dataclass(frozen=True, slots=True)
class Share:
    """A part of one GPU, in thousandths."""

    milli: int


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request of either format; times are in seconds."""

    line: int
    arrival: Fraction
    lifetime: Fraction | None
    """None if it was still running when the recording ended."""
    want: Share | str | Need
    """A share of a GPU, a profile by name, or a need."""
    count: int = 1
    """The number of instances, all or none."""
    tenant: str = ""


class Malformed(NamedTuple):
    """A skipped row and the reason."""

    line: int
    reason: str


@dataclass(frozen=True)
class Trace:
    """The content of a file: requests by arrival and line, and counts of skipped rows."""

    source: str
    format: TraceFormat
    rows: tuple[TraceRow, ...]
    without_gpu: int
    zero_lifetime: int
    malformed: tuple[Malformed, ...]
    end: Fraction
    """The end of the recording, in seconds."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a trace, mapped to one GPU model."""

    line: int
    arrival: Fraction
    lifetime: Fraction | None
    request: Request
    """The request of each instance."""
    count: int
    slices: int
    """Memory slices of all its instances; of a need, by its least wasteful profile."""
    label: str
    """A description of the request for tables."""
    tenant: str


@dataclass(frozen=True)
class Fitted:
    """A trace on one GPU model: its jobs, and the rows that the model cannot serve."""

    jobs: tuple[Job, ...]
    no_profile: int
    """Requests larger than any profile of the model."""
    malformed: tuple[Malformed, ...]
    """The malformed rows of the trace, and rows with profiles that the model does not have."""


class _BadRowError(SlicewiseError):
    """Raised for a malformed row."""


Cells = Mapping[str, str]


def read_trace(path: Path, form: TraceFormat | None = None, *, strict: bool = False) -> Trace:
    """Read a trace; its format is detected from the header unless given."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(file, str(path), form, strict)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a path
        why = getattr(error, "strerror", None) or str(error)
        raise SlicewiseError(f"trace {str(path)!r} cannot be read: {why}") from None


def _read(file: TextIO, source: str, form: TraceFormat | None, strict: bool) -> Trace:
    table = csv.reader(iter(lambda: file.readline(_LONGEST_LINE), ""), strict=True)
    try:
        header = [name.strip() for name in next(table, [])]
        form = _recognised(header, source, form)
        rows: list[TraceRow] = []
        malformed: list[Malformed] = []
        without_gpu = 0
        end = Fraction(0)
        parse = _parse_alibaba if form is TraceFormat.ALIBABA else _parse_plain
        for cells in filter(None, table):
            line = table.line_num
            try:
                if len(cells) != len(header):
                    raise _BadRowError(f"{len(cells)} cells where the header has {len(header)}")
                row = parse(line, dict(zip(header, map(str.strip, cells), strict=True)))
            except SlicewiseError as problem:
                if strict:
                    raise SlicewiseError(f"{source}, line {line}: {problem}") from None
                malformed.append(Malformed(line, str(problem)))
                continue
            end = max(end, row.arrival + (row.lifetime or 0))
            if row.count:
                rows.append(row)
            else:
                without_gpu += 1
    except csv.Error as error:
        raise SlicewiseError(f"{source}, line {table.line_num}: not CSV: {error}") from None
    lasting = [row for row in rows if row.lifetime != 0]
    if form is TraceFormat.ALIBABA:
        # A pod that outlasts the recording is recorded as deleted at its end.
        lasting = [_censored(row, end) for row in lasting]
    return Trace(
        source,
        form,
        tuple(sorted(lasting, key=lambda row: (row.arrival, row.line))),
        without_gpu,
        len(rows) - len(lasting),
        tuple(malformed),
        end,
    )


def _recognised(header: list[str], source: str, form: TraceFormat | None) -> TraceFormat:
    """Return the format, given or detected, after checking the header."""
    names = set(header)
    if len(names) < len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise SlicewiseError(f"{source}: column {twice!r} appears twice in the header")
    if form is None:
        fitting = [each for each in TraceFormat if names.issuperset(_REQUIRED[each])]
        if not fitting:
            known = "; ".join(f"{each}: {', '.join(_REQUIRED[each])}" for each in TraceFormat)
            raise SlicewiseError(f"{source}: the header is of no known format (columns of {known})")
        form = fitting[0]
    missing = [name for name in _REQUIRED[form] if name not in names]
    if missing:
        raise SlicewiseError(f"{source}: format {form} needs the column {missing[0]!r}")
    if form is TraceFormat.PLAIN and not ("profile" in names or {"compute", "memory_gb"} <= names):
        raise SlicewiseError(
            f"{source}: format plain needs the column 'profile', or 'compute' and 'memory_gb'"
        )
    return form


def _parse_alibaba(line: int, cells: Cells) -> TraceRow:
    """Parse a pod; one without a GPU has a count of 0."""
    arrival = _seconds(cells, "creation_time")
    lifetime = None
    if cells["deletion_time"]:
        lifetime = _seconds(cells, "deletion_time") - arrival
        if lifetime < 0:
            raise _BadRowError(
                f"deletion_time {cells['deletion_time']} is before "
                f"creation_time {cells['creation_time']}"
            )
    count = _integer(cells, "num_gpu", 0, _MOST_INSTANCES)
    # Several GPUs are whole ones; without a GPU the column is meaningless.
    milli = _integer(cells, "gpu_milli", 1, WHOLE) if count == 1 else WHOLE
    return TraceRow(line, arrival, lifetime, Share(milli), count)


def _censored(row: TraceRow, end: Fraction) -> TraceRow:
    if row.lifetime is not None and row.arrival + row.lifetime == end:
        return replace(row, lifetime=None)
    return row


def _parse_plain(line: int, cells: Cells) -> TraceRow:
    arrival = _seconds(cells, "arrival")
    lifetime = _seconds(cells, "lifetime") if cells["lifetime"] else None
    profile = cells.get("profile", "")
    need = [name for name in ("compute", "memory_gb") if cells.get(name)]
    want: str | Need
    if profile and need:
        raise _BadRowError(f"has a profile and {need[0]}: give a profile or a need, not both")
    if profile:
        want = profile
    elif len(need) == 2:
        compute = _integer(cells, "compute", 0, 1000)
        want = Need(compute, float(_number(cells, "memory_gb", "an amount of GB")))
    else:
        raise _BadRowError("needs a profile, or both compute and memory_gb")
    count = _integer(cells, "count", 1, _MOST_INSTANCES) if cells.get("count") else 1
    return TraceRow(line, arrival, lifetime, want, count, cells.get("tenant", ""))


def _seconds(cells: Cells, name: str) -> Fraction:
    return _number(cells, name, "a time in seconds")


def _number(cells: Cells, name: str, what: str) -> Fraction:
    # Decimals are exact as fractions, so equal times stay equal after any arithmetic.
    if not _NUMBER.fullmatch(cells[name]):
        raise _BadRowError(f"{name} {_shown(cells[name])} is not {what}, like 12 or 12.5")
    return Fraction(cells[name])


def _integer(cells: Cells, name: str, low: int, high: int) -> int:
    text = cells[name]
    if not (_INTEGER.fullmatch(text) and low <= int(text) <= high):
        raise _BadRowError(f"{name} {_shown(text)} is not a whole number from {low} to {high}")
    return int(text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")


def covering_profile(geometry: Geometry, share: Fraction) -> Profile | None:
    """Return the smallest plain profile with this share of the GPU's compute and memory."""
    return next(
        (
            profile
            for profile in sorted(geometry.plain_profiles, key=lambda p: (p.size, p.compute))
            if Fraction(profile.compute, geometry.compute) >= share
            and Fraction(profile.size, geometry.slices) >= share
        ),
        None,
    )


def fit(
    trace: Trace, geometry: Geometry, scale: Fraction = Fraction(1), *, strict: bool = False
) -> Fitted:
    """Map every row to a GPU model.

    A share of one GPU is multiplied by ``scale`` and mapped to the smallest profile that covers
    it. Several GPUs are that many whole ones, regardless of the scale.
    """
    jobs: list[Job] = []
    malformed = list(trace.malformed)
    no_profile = 0
    # A few kinds of requests occur thousands of times.
    known: dict[object, tuple[Request, Profile] | None] = {}
    for row in trace.rows:
        kind = (row.want, row.count > 1)
        try:
            if kind not in known:
                known[kind] = _served(row, geometry, scale)
            served = known[kind]
        except UnknownNameError as error:
            if strict:
                raise SlicewiseError(f"{trace.source}, line {row.line}: {error}") from None
            malformed.append(Malformed(row.line, str(error)))
            continue
        if served is None:
            no_profile += 1
            continue
        request, profile = served
        label = f"{row.count} x {request}" if row.count > 1 else str(request)
        size = row.count * profile.size
        jobs.append(
            Job(row.line, row.arrival, row.lifetime, request, row.count, size, label, row.tenant)
        )
    return Fitted(tuple(jobs), no_profile, tuple(sorted(malformed)))


def _served(row: TraceRow, geometry: Geometry, scale: Fraction) -> tuple[Request, Profile] | None:
    """Return the request of a row and the profile it counts as; None if all are too small."""
    if isinstance(row.want, Share):
        share = Fraction(1) if row.count > 1 else scale * Fraction(row.want.milli, WHOLE)
        profile = covering_profile(geometry, share)
        return None if profile is None else (Request(profile.name), profile)
    if isinstance(row.want, str):
        return Request(row.want), geometry.profile(row.want)
    request = Request(row.want)
    candidates = request.candidates(geometry)
    return (request, min(candidates, key=lambda each: each[0])[1]) if candidates else None
