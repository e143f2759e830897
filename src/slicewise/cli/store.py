"""`slicewise backup`, `restore` and `verify`: maintenance of a service's store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from slicewise.cli.connection import TokenFile, connect, service_packages
from slicewise.cli.options import AsJson
from slicewise.cli.output import as_json
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.store.contents import Contents

Data = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The data folder of a service with SQLite.")
]
Database = Annotated[
    str | None, typer.Option(metavar="URL", help="The PostgreSQL database of a service.")
]
RunningServer = Annotated[
    str | None, typer.Option(metavar="URL", help="A running service to back up.")
]
BackupToRead = Annotated[
    Path | None,
    typer.Option("--backup", metavar="FILE", help="Read a backup instead of a store."),
]
Archive = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Read the archive (journal.archive) before the journal."),
]
_ROWS_PER_UPDATE = 1000
"""Rows between two updates of the progress bar."""
BackupFile = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")]


def backup(
    file: BackupFile,
    server: RunningServer = None,
    token_file: TokenFile = None,
    data: Data = None,
    database: Database = None,
    json: AsJson = False,
) -> None:
    """Write the contents of a store to one file.

    --server asks a running service for the backup, which needs an admin token. --data reads the
    folder of a stopped service. --database reads a database, also while a service uses it.
    """
    with service_packages("this command"):
        from slicewise.store import backup, open_contents, save_backup
        from slicewise.store.backup_file import refuse_existing
    _one_of(server=server, data=data, database=database)
    refuse_existing(file)
    if server is not None:
        with connect(server, token_file) as client:
            rows = save_backup(client.backup(), file)
    else:
        with (
            open_contents(data, database) as contents,
            _progress("backing up", contents.last_seq) as advance,
        ):
            rows = backup(contents, file, advance)
    size = file.stat().st_size
    if json:
        typer.echo(as_json({"file": str(file), "rows": rows, "bytes": size}), nl=False)
    else:
        typer.echo(f"{file}: {rows} rows of the journal, {size} bytes")


def restore(
    file: BackupFile, data: Data = None, database: Database = None, json: AsJson = False
) -> None:
    """Restore a backup into an empty folder or database, completely or not at all."""
    with service_packages("this command"):
        from slicewise.store import open_backup, open_store, restore
    _one_of(data=data, database=database)
    with open_backup(file) as contents:
        total = contents.last_seq
    if data is not None:
        try:
            data.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SlicewiseError(f"{str(data)!r} cannot be created: {error.strerror}") from None
    target = open_store(data, database)
    try:
        with _progress("restoring", total) as advance:
            rows = restore(file, target, advance)
    finally:
        target.close()
    if json:
        typer.echo(as_json({"file": str(file), "rows": rows}), nl=False)
    else:
        typer.echo(f"{rows} rows of the journal restored from {file}")


def verify(
    data: Data = None,
    database: Database = None,
    backup: BackupToRead = None,
    archive: Archive = None,
    json: AsJson = False,
) -> None:
    """Check the stored state against the journal; exit with 1 if they differ."""
    with service_packages("this command"):
        from slicewise.store import verify
    with ExitStack() as stack:
        contents = stack.enter_context(open_source(data, database, backup, archive))
        report = verify(contents, stack.enter_context(_progress("verifying", contents.last_seq)))
    if json:
        document = {
            "clean": report.clean,
            "rows": report.rows,
            "snapshots": report.snapshots,
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
            f"{report.rows} rows, {report.snapshots} snapshots, {report.answers} answers: {verdict}"
        )
    if not report.clean:
        raise typer.Exit(1)


@contextmanager
def open_source(
    data: Path | None, database: str | None, backup: Path | None, archive: Path | None
) -> Iterator[Contents]:
    """Open a store or a backup for reading; if an archive is named, its entries come first."""
    with service_packages("this command"):
        from slicewise.store import open_backup, open_contents
        from slicewise.store.archive import ArchivedContents
    _one_of(data=data, database=database, backup=backup)
    with open_contents(data, database) if backup is None else open_backup(backup) as contents:
        yield contents if archive is None else ArchivedContents(contents, archive)


def _one_of(**given: Path | str | None) -> None:
    """Refuse unless exactly one of these options is given."""
    named = sum(value is not None for value in given.values())
    if named != 1:
        *others, last = (f"--{name}" for name in given)
        choice = f"{', '.join(others)} or {last}"
        raise SlicewiseError(f"name one of {choice}, not {named or 'none'} of them")


@contextmanager
def _progress(what: str, rows: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if standard error is a terminal."""
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

        rows_since = 0

        def advance(more: int) -> None:
            nonlocal rows_since
            rows_since += more
            if rows_since >= _ROWS_PER_UPDATE:
                bar.update(task, advance=rows_since)
                rows_since = 0

        yield advance
