"""Backups: everything a store holds in one file, the same for every database.

A backup is gzipped text with one JSON array per line: a header, then snapshots, answers and rows,
then an end line with their counts and the digest of all lines before it. A truncated file has no
end line, and a changed file has another digest.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Seconds
from slicewise.store.contents import Contents, JournalHead, StoredAnswer, StoredRow, StoredSnapshot
from slicewise.store.sql import SqlStore

FORMAT = 1
_LEVEL = 3
PIECE_BYTES = 1 << 16
"""The largest piece of a backup that is written or sent at a time."""

Tick = Callable[[int], None]
"""Called with the number of rows read or written since the last call."""


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """A line; the first item of the array is its kind."""


class _Header(_Line, frozen=True, tag="slicewise-backup"):
    format: int
    last_seq: int
    epoch: int
    head: JournalHead


class _Snapshot(_Line, frozen=True, tag="snapshot"):
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
    snapshots: int
    answers: int
    rows: int
    digest: str


_encode = msgspec.json.Encoder().encode
_Any = _Header | _Snapshot | _Answer | _Row | _End
_decoder: msgspec.json.Decoder[_Any] = msgspec.json.Decoder(_Any)
_Kind = TypeVar("_Kind", _Snapshot, _Answer, _Row)


def no_tick(rows: int) -> None:
    """Ignore progress."""


def backup(source: SqlStore | Contents, path: Path, tick: Tick = no_tick) -> int:
    """Write a backup to a new file and return the number of rows in it."""
    contents = source.contents() if isinstance(source, SqlStore) else source
    rows = 0

    def count(more: int) -> None:
        nonlocal rows
        rows += more
        tick(more)

    _write_file(path, backup_pieces(contents, count))
    return rows


def save_backup(pieces: Iterable[bytes], path: Path) -> int:
    """Write a backup that a service streams to a new file and return the number of rows in it.

    The file is read back and checked before it gets its name, so a stream that was cut short
    leaves nothing behind.
    """
    rows = 0

    def check(part: Path) -> None:
        nonlocal rows
        with open_backup(part, "the backup from the service") as contents:
            rows = _check(contents)

    _write_file(path, pieces, check)
    return rows


def _check(contents: BackupContents) -> int:
    """Read a backup to its end, which checks its digest; returns the number of rows."""
    for section in (contents.snapshots(), contents.answers()):
        for _ in section:
            pass
    return sum(1 for _ in contents.rows())


def _write_file(
    path: Path, pieces: Iterable[bytes], check: Callable[[Path], None] = lambda part: None
) -> None:
    """Write a new file. It gets its name when it is complete, checked and on disk."""
    refuse_existing(path)
    try:
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            # A backup holds everything the service knows: only its owner may read it.
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            check(part)
            refuse_existing(path)  # it may have been created in the meantime
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise _not_written(path, error) from None


def refuse_existing(path: Path) -> None:
    """Refuse a path that exists, or that is not valid."""
    try:
        taken = path.exists()
    except OSError as error:
        raise _not_written(path, error) from None
    if taken:
        raise SlicewiseError(f"{str(path)!r} already exists: choose another name for the backup")


def _not_written(path: Path, error: OSError) -> SlicewiseError:
    return SlicewiseError(f"{str(path)!r} cannot be written: {error.strerror}")


def backup_pieces(contents: Contents, tick: Tick = no_tick) -> Iterator[bytes]:
    """A backup in pieces of at most PIECE_BYTES.

    Nothing is held between two pieces but the text of the current page of rows, so a reader may
    take its time.
    """
    digest = hashlib.sha256()
    pack = zlib.compressobj(_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    text, packed = bytearray(), bytearray()
    counts = {_Snapshot: 0, _Answer: 0, _Row: 0}
    for line in _lines(contents):
        text += _encode(line) + b"\n"
        if not isinstance(line, _Header):
            counts[type(line)] += 1
        if isinstance(line, _Row):
            tick(1)
        if len(text) >= PIECE_BYTES:
            digest.update(text)
            packed += pack.compress(text)
            text.clear()
            while len(packed) >= PIECE_BYTES:
                yield bytes(packed[:PIECE_BYTES])
                del packed[:PIECE_BYTES]
    digest.update(text)
    snapshots, answers, rows = counts.values()
    text += _encode(_End(snapshots, answers, rows, digest.hexdigest())) + b"\n"
    packed += pack.compress(text) + pack.flush()
    for start in range(0, len(packed), PIECE_BYTES):
        yield bytes(packed[start : start + PIECE_BYTES])


def _lines(contents: Contents) -> Iterator[_Header | _Snapshot | _Answer | _Row]:
    yield _Header(FORMAT, contents.last_seq, contents.epoch, contents.head)
    for snapshot in contents.snapshots():
        yield _Snapshot(*snapshot)
    for answer in contents.answers():
        yield _Answer(*answer)
    for row in contents.rows():
        yield _Row(*row[:-1])


class BackupContents:
    """The contents of a backup, read line by line; the end line is checked too."""

    def __init__(self, lines: Iterator[bytes], name: str) -> None:
        self._lines = lines
        self._name = name
        self._digest = hashlib.sha256()
        self._counts = {_Snapshot: 0, _Answer: 0, _Row: 0}
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
        """None: a backup is checked as it is read, and refused if it is damaged."""
        return []

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """The snapshots, oldest first."""
        return (StoredSnapshot(*msgspec.structs.astuple(line)) for line in self._section(_Snapshot))

    def answers(self) -> Iterator[StoredAnswer]:
        """The answers."""
        return (StoredAnswer(*msgspec.structs.astuple(line)) for line in self._section(_Answer))

    def rows(self) -> Iterator[StoredRow]:
        """The journal in order; at the end the end line is checked."""
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
            raise damaged(self._name, "its sections are out of order")
        if end.digest != self._digest.hexdigest():
            raise damaged(self._name, "its digest does not match")
        if (end.snapshots, end.answers, end.rows) != tuple(self._counts.values()):
            raise damaged(self._name, "its number of lines is not the recorded one")
        try:
            more = next(self._lines, b"")
        except (EOFError, OSError, zlib.error) as error:
            raise damaged(self._name, str(error)) from None
        if more:
            raise damaged(self._name, "something follows its end")


@contextmanager
def open_backup(path: Path, name: str | None = None) -> Iterator[BackupContents]:
    """Open a backup file; error messages call it by its path, or by ``name``."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(gzip.open(path, "rb"))
        except OSError as error:
            raise SlicewiseError(f"{str(path)!r} cannot be read: {error.strerror}") from None
        yield BackupContents(iter(file), name or repr(str(path)))


def damaged(name: str, why: str) -> SlicewiseError:
    """The error for a damaged backup."""
    return SlicewiseError(f"{name} is damaged or was cut short: {why}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
