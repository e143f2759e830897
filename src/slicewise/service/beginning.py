"""Where a history begins: a first start is one on purpose, or where nothing was before.

A database may be empty because the volume with the real one is not mounted, or because another one
was named. So the service leaves the name of its history in its folder, and an empty database beside
that is refused.
"""

from __future__ import annotations

from pathlib import Path

from slicewise.control.ports import Span
from slicewise.core.errors import SlicewiseError
from slicewise.service.first_start import TOKEN_FILE, write_secret
from slicewise.service.logs import logger

MARKER = "slicewise.history"

log = logger()


def traces(folder: Path) -> tuple[str, ...]:
    """What a service that ran from this folder has left in it."""
    return tuple(name for name in (MARKER, TOKEN_FILE) if (folder / name).exists())


def check_beginning(folder: Path, span: Span | None, *, init: bool, required: bool) -> None:
    """Refuse to serve where a history is missing, or is another one than it should be.

    ``span`` is what the database tells, None if it holds nothing at all.
    """
    begun = span is not None and span.last > 0
    if init:
        if begun:
            raise SlicewiseError(
                "--init begins a new history, and this database holds one already: serve without "
                "--init, or name a new folder or database"
            )
    elif not begun:
        left = " and ".join(traces(folder))
        if left:
            raise SlicewiseError(
                f"a service ran from {folder} before ({left} is there), but its database is empty: "
                "mount the volume or name the database it had, or restore a backup; to begin a "
                "new history here, add --init"
            )
        if required:
            raise SlicewiseError(
                f"require_history is set, and there is no history in the database of {folder}: "
                "mount the volume or name the right database; for the first start, add --init"
            )
    else:
        assert span is not None
        marked = _marked(folder)
        if marked not in (None, span.history, *span.former):
            raise SlicewiseError(
                f"the database tells the history {span.history}, and {folder} belongs to {marked}: "
                "name the right database or folder; if this is on purpose, remove "
                f"{folder / MARKER}"
            )


def leave_trace(folder: Path, history: str) -> None:
    """Write down which history is served from this folder."""
    try:
        if _marked(folder) != history:
            write_secret(folder / MARKER, history)
    except SlicewiseError as error:
        log.warning("an empty database would not be noticed", problem=str(error))


def _marked(folder: Path) -> str | None:
    try:
        return (folder / MARKER).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SlicewiseError(f"{folder / MARKER}: cannot be read: {error}") from None
