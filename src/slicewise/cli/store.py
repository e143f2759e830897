"""`slicewise backup`, `restore` and `verify`: looking after what the service keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slicewise.cli.options import AsJson
from slicewise.cli.output import as_json
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.store.contents import Contents

Data = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The folder of the service, with SQLite in it.")
]
Database = Annotated[
    str | None, typer.Option(metavar="URL", help="The PostgreSQL database of the service.")
]
OwnBackup = Annotated[
    Path | None,
    typer.Option("--backup", metavar="FILE", help="A backup, instead of a service's own."),
]
Archive = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The archive (journal.archive), to begin with what is in it."),
]
TICKS = 1000
"""Rows between two looks at the bar."""
BackupFile = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")]


def backup(
    file: BackupFile, data: Data = None, database: Database = None, json: AsJson = False
) -> None:
    """Write everything the service keeps to one file; the service may go on meanwhile."""
    with _extra():
        from slicewise.store import backup, open_contents
        from slicewise.store.backups import refuse_existing
    _one_of(data, database)
    refuse_existing(file)
    with (
        open_contents(data, database) as contents,
        _progress("backing up", contents.last_seq) as tick,
    ):
        rows = backup(contents, file, tick)
    size = file.stat().st_size
    if json:
        typer.echo(as_json({"file": str(file), "rows": rows, "bytes": size}), nl=False)
    else:
        typer.echo(f"{file}: {rows} rows of the journal, {size} bytes")


def restore(
    file: BackupFile, data: Data = None, database: Database = None, json: AsJson = False
) -> None:
    """Bring a backup into an empty folder or database, all of it or nothing."""
    with _extra():
        from slicewise.store import open_backup, open_store, restore
    _one_of(data, database)
    with open_backup(file) as contents:
        total = contents.last_seq
    if data is not None:
        try:
            data.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SlicewiseError(f"{str(data)!r} cannot be made: {error.strerror}") from None
    target = open_store(data, database)
    try:
        with _progress("restoring", total) as tick:
            rows = restore(file, target, tick)
    finally:
        target.close()
    if json:
        typer.echo(as_json({"file": str(file), "rows": rows}), nl=False)
    else:
        typer.echo(f"{rows} rows of the journal restored from {file}")


def verify(
    data: Data = None,
    database: Database = None,
    backup: OwnBackup = None,
    archive: Archive = None,
    json: AsJson = False,
) -> None:
    """Work out from the journal whether everything is as it must be; exit 1 if it is not."""
    with _extra():
        from slicewise.store import verify
    with ExitStack() as stack:
        contents = stack.enter_context(opened(data, database, backup, archive))
        report = verify(contents, stack.enter_context(_progress("verifying", contents.last_seq)))
    if json:
        document = {
            "clean": report.clean,
            "rows": report.rows,
            "images": report.images,
            "answers": report.answers,
            "findings": report.findings,
            "more": report.more,
        }
        typer.echo(as_json(document), nl=False)
    else:
        for finding in report.findings:
            typer.echo(finding)
        if report.more:
            typer.echo(f"and {report.more} more findings")
        verdict = "clean" if report.clean else f"{len(report.findings) + report.more} findings"
        typer.echo(
            f"{report.rows} rows, {report.images} images, {report.answers} answers: {verdict}"
        )
    if not report.clean:
        raise typer.Exit(1)


@contextmanager
def opened(
    data: Path | None, database: str | None, backup: Path | None, archive: Path | None
) -> Iterator[Contents]:
    """What a service keeps, or what a backup holds; with the archive in front, if one is named."""
    with _extra():
        from slicewise.store import open_backup, open_contents
        from slicewise.store.archive import ArchivedContents
    _one_of(data, database, backup)
    with open_contents(data, database) if backup is None else open_backup(backup) as contents:
        yield contents if archive is None else ArchivedContents(contents, archive)


@contextmanager
def _extra() -> Iterator[None]:
    """The store's packages are an extra: say so if they are missing."""
    try:
        yield
    except ImportError as error:
        raise SlicewiseError(
            f"this needs the extra packages of slicewise[service] ({error.name} is missing)"
        ) from None


def _one_of(data: Path | None, database: str | None, *others: Path | None) -> None:
    named = sum(one is not None for one in (data, database, *others))
    if named != 1:
        choice = "--data, --database or --backup" if others else "--data or --database"
        raise SlicewiseError(f"name one of {choice}, not {named or 'none'} of them")


@contextmanager
def _progress(what: str, rows: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, and nothing elsewhere."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows, left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=rows)

        ticks = 0

        def tick(more: int) -> None:
            nonlocal ticks
            ticks += more
            if ticks >= TICKS:
                bar.update(task, advance=ticks)
                ticks = 0

        yield tick
