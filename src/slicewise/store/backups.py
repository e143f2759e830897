"""Backups: everything a store holds in one file, the same for every database.

A backup is gzip'd text, one JSON array a line: a header, then images, answers and rows, then an end
that counts them and holds the digest of every line before it. A file that was cut short has no end,
and one that was changed has another digest.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from slicewise.control.entries import Seconds
from slicewise.core.errors import SlicewiseError
from slicewise.store.contents import Contents, Head, StoredAnswer, StoredImage, StoredRow
from slicewise.store.sql import SqlStore

FORMAT = 1
_LEVEL = 3
_FLUSH = 1 << 16

Tick = Callable[[int], None]
"""Called with how many more rows were read or written."""


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """One line; the first of the array says which kind."""


class _Header(_Line, frozen=True, tag="slicewise-backup"):
    format: int
    last_seq: int
    epoch: int
    head: Head


class _Image(_Line, frozen=True, tag="image"):
    seq: int
    at: Seconds
    data: str
    chain: bytes
    checksum: bytes


class _Answer(_Line, frozen=True, tag="answer"):
    tenant: str
    key: str
    digest: str
    status: int
    body: str
    at: Seconds
    seq: int
    checksum: bytes


class _Row(_Line, frozen=True, tag="row"):
    seq: int
    at: Seconds
    epoch: int
    actor: str
    origin: str
    data: str
    chain: bytes


class _End(_Line, frozen=True, tag="end"):
    images: int
    answers: int
    rows: int
    digest: str


_encode = msgspec.json.Encoder().encode
_Any = _Header | _Image | _Answer | _Row | _End
_decoder: msgspec.json.Decoder[_Any] = msgspec.json.Decoder(_Any)
_Kind = TypeVar("_Kind", _Image, _Answer, _Row)


def no_tick(rows: int) -> None:
    """For those who do not want to know how far it is."""


def backup(source: SqlStore | Contents, path: Path, tick: Tick = no_tick) -> int:
    """Write a backup to a new file and return how many rows it holds.

    The file appears under its name when it is complete and on disk, and not before.
    """
    contents = source.contents() if isinstance(source, SqlStore) else source
    refuse_existing(path)
    try:
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            rows = _write_file(contents, part, tick)
            refuse_existing(path)  # somebody else's may have been written meanwhile
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise _not_written(path, error) from None
    return rows


def refuse_existing(path: Path) -> None:
    """Refuse a name that is taken, or that no file can have."""
    try:
        taken = path.exists()
    except OSError as error:
        raise _not_written(path, error) from None
    if taken:
        raise SlicewiseError(f"{str(path)!r} exists already: give the backup a name of its own")


def _not_written(path: Path, error: OSError) -> SlicewiseError:
    return SlicewiseError(f"{str(path)!r} cannot be written: {error.strerror}")


def _write_file(contents: Contents, path: Path, tick: Tick) -> int:
    # It holds everything the service knows, so nobody else may read it.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        rows = write(contents, file, tick)
        file.flush()
        os.fsync(file.fileno())
    return rows


def write(contents: Contents, file: IO[bytes], tick: Tick = no_tick) -> int:
    """Write a backup to a stream and return how many rows it holds."""
    digest = hashlib.sha256()
    counts = {"images": 0, "answers": 0, "rows": 0}
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL, mtime=0) as packed:
        waiting = bytearray()

        def put(line: _Line) -> None:
            nonlocal waiting
            waiting += _encode(line)
            waiting += b"\n"
            if len(waiting) >= _FLUSH:
                flush()

        def flush() -> None:
            digest.update(waiting)
            packed.write(waiting)
            waiting.clear()

        put(_Header(FORMAT, contents.last_seq, contents.epoch, contents.head))
        for image in contents.images():
            put(_Image(*image))
            counts["images"] += 1
        for answer in contents.answers():
            put(_Answer(*answer))
            counts["answers"] += 1
        for row in contents.rows():
            put(_Row(*row[:-1]))
            counts["rows"] += 1
            tick(1)
        flush()
        put(_End(**counts, digest=digest.hexdigest()))
        flush()
    return counts["rows"]


class BackupContents:
    """The contents of a backup, as they are read from a stream; the end is checked, too."""

    def __init__(self, lines: Iterator[bytes], name: str) -> None:
        self._lines = lines
        self._name = name
        self._digest = hashlib.sha256()
        self._counts = {_Image: 0, _Answer: 0, _Row: 0}
        header = self._next()
        if not isinstance(header, _Header):
            raise SlicewiseError(f"{name} is not a backup of slicewise")
        if header.format != FORMAT:
            raise SlicewiseError(
                f"{name} has format {header.format}, and this slicewise reads {FORMAT}: "
                "use a newer one"
            )
        self.last_seq = header.last_seq
        self.epoch = header.epoch
        self.head = header.head
        self._ahead = self._next()

    def damage(self) -> list[str]:
        """A backup is checked as it is read, and refused if it is damaged."""
        return []

    def images(self) -> Iterator[StoredImage]:
        """The images, the oldest first."""
        return (StoredImage(*msgspec.structs.astuple(line)) for line in self._section(_Image))

    def answers(self) -> Iterator[StoredAnswer]:
        """The answers."""
        return (StoredAnswer(*msgspec.structs.astuple(line)) for line in self._section(_Answer))

    def rows(self) -> Iterator[StoredRow]:
        """The journal in order, and then the end of the file, which must be right."""
        for line in self._section(_Row):
            yield StoredRow(*msgspec.structs.astuple(line))
        self._check_end()

    def _section(self, kind: type[_Kind]) -> Iterator[_Kind]:
        while isinstance(self._ahead, kind):
            line = self._ahead
            self._counts[kind] += 1
            self._ahead = self._next()
            yield line

    def _next(self) -> _Any:
        try:
            text = next(self._lines, b"")
            line = _decoder.decode(text)
        except (EOFError, zlib.error, gzip.BadGzipFile, msgspec.DecodeError, ValueError) as error:
            raise damaged(self._name, str(error)) from None
        except OSError as error:
            raise SlicewiseError(f"{self._name} cannot be read: {error}") from None
        if not isinstance(line, _End):
            self._digest.update(text)
        return line

    def _check_end(self) -> None:
        end = self._ahead
        if not isinstance(end, _End):
            raise damaged(self._name, "its parts are out of order")
        if end.digest != self._digest.hexdigest():
            raise damaged(self._name, "its digest does not fit")
        if (end.images, end.answers, end.rows) != tuple(self._counts.values()):
            raise damaged(self._name, "it does not hold as many lines as it says")
        try:
            more = next(self._lines, b"")
        except (EOFError, OSError, zlib.error) as error:
            raise damaged(self._name, str(error)) from None
        if more:
            raise damaged(self._name, "something follows its end")


@contextmanager
def open_backup(path: Path) -> Iterator[BackupContents]:
    """The contents of a backup file."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(gzip.open(path, "rb"))
        except OSError as error:
            raise SlicewiseError(f"{str(path)!r} cannot be read: {error.strerror}") from None
        yield BackupContents(iter(file), repr(str(path)))


def damaged(name: str, why: str) -> SlicewiseError:
    """What is said about a backup that is not whole."""
    return SlicewiseError(f"{name} is damaged or was cut short: {why}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
