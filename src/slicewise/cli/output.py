"""Results as files: JSON and CSV, and a check beforehand that they can be written."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from slicewise.core.errors import SlicewiseError

Row = Mapping[str, object]


def write_text(path: Path, text: str) -> None:
    """Write a file whole; a problem is one line that names it."""
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def prepare_folder(path: Path) -> None:
    """Create the folder and check that it is writable, before any long work."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".slicewise-probe"
        probe.touch()
        probe.unlink()
    except FileExistsError:
        raise SlicewiseError(f"{str(path)!r} is a file, not a folder") from None
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def prepare_files(csv: Path | None, plot: Path | None, curve: Path | None = None) -> None:
    """Check that the result files can be written, before any long work."""
    if plot is not None and plot.suffix not in (".png", ".svg"):
        raise SlicewiseError(f"--plot {str(plot)!r} must end in .png or .svg")
    seen: set[Path] = set()
    for path in filter(None, (csv, curve, plot)):
        if path.absolute() in seen:
            raise SlicewiseError(f"{str(path)!r} is named for two results: one would be lost")
        seen.add(path.absolute())
        _prepare_file(path)


def _prepare_file(path: Path) -> None:
    """Check that a file can be created; an existing one is left unchanged."""
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def say_written(*paths: Path | None) -> None:
    """Name the files that were written, on standard error."""
    for path in filter(None, paths):
        typer.echo(f"Written: {path}", err=True)


def as_json(document: object) -> str:
    """Format indented JSON; NaN and infinity are errors."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """CSV with the intervals as two columns each."""
    flat = [_flatten(row) for row in rows]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _flatten(row: Row) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in row.items():
        if name.endswith("_ci95"):
            low, high = value if isinstance(value, list) else ("", "")
            flat[f"{name}_low"], flat[f"{name}_high"] = low, high
        else:
            flat[name] = "" if value is None else value
    return flat


def _unwritable(path: Path, error: OSError | ValueError) -> SlicewiseError:
    why = getattr(error, "strerror", None) or str(error)
    return SlicewiseError(f"{str(path)!r} cannot be written: {why}")
