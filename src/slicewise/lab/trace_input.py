"""The trace of `replay` and `plan`: options, reading, and a summary of the rows it skips."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry
from slicewise.lab.results import Row
from slicewise.lab.timeline import Timeline, busy_begin, lay_out
from slicewise.lab.trace import Fitted, Trace, TraceFormat, fit, read_trace

_SHOWN_LINES = 5
"""Malformed rows named in the text; JSON has all of them."""

_REASONS = {
    "without_gpu": "without a GPU",
    "zero_lifetime": "of zero lifetime",
    "over_before_begin": "over before the beginning",
    "no_profile": "larger than any profile",
    "malformed": "malformed",
}


@dataclass(frozen=True)
class TraceOptions:
    """The options as given; None for the default."""

    format: TraceFormat | None
    scale: float | None
    compress: float | None
    begin: float | None
    strict: bool


@dataclass(frozen=True)
class TraceInput:
    """A trace on one GPU model, in the order of time."""

    trace: Trace
    fitted: Fitted
    timeline: Timeline
    scale: float | None
    """None for a trace without shares of a GPU."""

    @property
    def setting(self) -> Row:
        """What was read and how, for JSON and CSV."""
        return {
            "trace": self.trace.source,
            "format": str(self.trace.format),
            "scale": self.scale,
            "compress": float(self.timeline.compress),
        }

    @property
    def skipped(self) -> Row:
        """The rows that are not replayed: counts by reason, and all malformed rows."""
        return {
            "left_out": _skipped_counts(self.trace, self.fitted, self.timeline.over_before),
            "malformed_rows": [row._asdict() for row in self.fitted.malformed],
        }

    def skipped_lines(self) -> Iterator[str]:
        """Describe the rows that are not replayed, for people."""
        return _describe(self.trace, self.fitted, self.timeline.over_before)


def check_trace_options(options: TraceOptions) -> tuple[Fraction, Fraction, Fraction | None]:
    """Return scale, compression and beginning as exact numbers, or raise if out of range."""
    scale = _exact("--scale", 1 if options.scale is None else options.scale, 0.001, 1000)
    compress = 1 if options.compress is None else options.compress
    begin = None if options.begin is None else _exact("--begin", options.begin, 0, 1e15)
    return scale, _exact("--compress", compress, 0.001, 1_000_000), begin


def load_trace(path: Path, options: TraceOptions, geometry: Geometry) -> TraceInput:
    """Read a trace, map its rows to a GPU model and lay them out in time."""
    scale, compress, begin = check_trace_options(options)
    trace = read_trace(path, options.format, strict=options.strict)
    if trace.format is TraceFormat.PLAIN and options.scale is not None:
        raise SlicewiseError("--scale is for shares of a GPU, and a plain trace has none")
    fitted = fit(trace, geometry, scale, strict=options.strict)
    if not fitted.jobs:
        why = " ".join(_describe(trace, fitted, 0, rest="")) or "It has no rows."
        raise SlicewiseError(f"{trace.source} has no request that can be replayed. {why}")
    if begin is None:
        has_thin_head = trace.format is TraceFormat.ALIBABA
        begin = busy_begin(fitted.jobs) if has_thin_head else fitted.jobs[0].arrival
    return TraceInput(
        trace,
        fitted,
        lay_out(fitted.jobs, begin, compress),
        float(scale) if trace.format is TraceFormat.ALIBABA else None,
    )


def _exact(option: str, value: float, low: float, high: float) -> Fraction:
    """Return the number as typed: 0.2 is one fifth, not the nearest binary fraction."""
    if not (math.isfinite(value) and low <= value <= high):
        raise SlicewiseError(f"{option} must be {low:g} to {high:g}, not {value:g}")
    return Fraction(str(value))


def _skipped_counts(trace: Trace, fitted: Fitted, over_before: int) -> dict[str, int]:
    return {
        "without_gpu": trace.without_gpu,
        "zero_lifetime": trace.zero_lifetime,
        "over_before_begin": over_before,
        "no_profile": fitted.no_profile,
        "malformed": len(fitted.malformed),
    }


def _describe(
    trace: Trace, fitted: Fitted, over_before: int, rest: str = " (--json lists them)"
) -> Iterator[str]:
    """Yield the counts, then the first malformed rows, and the place of the others."""
    counts = _skipped_counts(trace, fitted, over_before)
    parts = [f"{n} {_REASONS[name]}" for name, n in counts.items() if n]
    if parts:
        yield f"Rows left out: {', '.join(parts)}."
    for line, reason in fitted.malformed[:_SHOWN_LINES]:
        yield f"  line {line}: {reason}"
    if len(fitted.malformed) > _SHOWN_LINES:
        yield f"  and {len(fitted.malformed) - _SHOWN_LINES} more{rest}"
