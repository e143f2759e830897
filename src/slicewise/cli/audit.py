"""`slicewise audit`: export the journal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slicewise.cli.options import command_group
from slicewise.cli.store import Archive, BackupToRead, Data, Database, open_source
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.store.contents import Contents, StoredRow

audit = command_group()


@audit.callback()
def _group() -> None:
    """Export the journal for an audit."""


@audit.command()
def export(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")],
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="First time to include, such as 2026-01-31 or 2026-01-31T12:00."
        ),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Time to stop before.")] = None,
    data: Data = None,
    database: Database = None,
    backup: BackupToRead = None,
    archive: Archive = None,
) -> None:
    """Write journal entries as JSON lines, with the digests that chain them."""
    first, end = _moment("since", since), _moment("until", until)
    with ExitStack() as stack:
        contents = stack.enter_context(open_source(data, database, backup, archive))
        count = _write(contents, out, first, end)
    typer.echo(f"{out}: {count} entries of the journal")


def _write(contents: Contents, out: Path, first: float | None, end: float | None) -> int:
    from slicewise.store.archive import write_lines

    for _ in chain(contents.snapshots(), contents.answers()):
        pass  # a backup file holds them before the entries
    base, digest = contents.head.base, contents.head.base_chain
    rows: Iterator[StoredRow] = contents.rows()
    chosen: list[StoredRow] = []
    for row in rows:
        if first is None or row.at >= first:
            chosen.append(row)
            break
        base, digest = row.seq, row.chain

    def wanted() -> Iterator[StoredRow]:
        for row in chain(chosen, rows):
            if end is None or row.at < end:
                yield row

    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise SlicewiseError(f"{str(out)!r} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            count = write_lines(file, wanted(), (contents.head.history, base, digest))
            file.flush()
            os.fsync(descriptor)
    except BaseException as error:
        with suppress(OSError):
            out.unlink()
        if isinstance(error, OSError):
            raise SlicewiseError(f"{str(out)!r} cannot be written: {error.strerror}") from None
        raise
    return count


def _moment(name: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise SlicewiseError(
            f"{name} must be a time such as 2026-01-31T12:00, not {text!r}"
        ) from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
