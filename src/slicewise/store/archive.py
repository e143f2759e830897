"""Archives: entries of the journal as JSON lines, with the digests that chain them together.

Retention appends entries here before it prunes them. A file begins with a header that names the
history and the digest before its first entry, so that an auditor can check every entry, and that
each file continues the one before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Seconds
from slicewise.store.checksums import checksum
from slicewise.store.contents import Contents, JournalHead, StoredRow

FILE_BYTES = 1 << 26
"""The approximate size at which a new file is started."""
_TAIL = 1 << 16


class _Header(msgspec.Struct, frozen=True):
    history: str
    base: int
    """The last entry before the file, and its digest."""
    chain: str


class _Line(msgspec.Struct, frozen=True):
    seq: int
    at: Seconds
    epoch: int
    actor: str
    origin: str
    entry: msgspec.Raw
    chain: str


_encode = msgspec.json.Encoder().encode
_header = msgspec.json.Decoder(_Header).decode
_line = msgspec.json.Decoder(_Line).decode


def write_lines(
    file: IO[bytes], rows: Iterable[StoredRow], begins: tuple[str, int, bytes] | None = None
) -> int:
    """Write entries to a file, after a header if ``begins`` is given; returns how many."""
    if begins is not None:
        history, base, chain = begins
        file.write(_encode(_Header(history, base, chain.hex())) + b"\n")
    count = 0
    for row in rows:
        entry = msgspec.Raw(row.data.encode())
        line = _Line(row.seq, row.at, row.epoch, row.actor, row.origin, entry, row.chain.hex())
        file.write(_encode(line) + b"\n")
        count += 1
    return count


def append(folder: Path, head: JournalHead, rows: Sequence[StoredRow]) -> None:
    """Append the entries after ``head.base`` to the archive and sync it.

    Entries that it has already, because the process ended before it pruned them, are skipped.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = _files(folder, head.history)
        last = _last_seq(files[-1]) if files else 0
        fresh = [row for row in rows if row.seq > last]
        if not fresh:
            return
        if last and fresh[0].seq == last + 1 and files[-1].stat().st_size < FILE_BYTES:
            _write(files[-1], fresh, None)
            return
        known = {row.seq: row.chain for row in rows} | {head.base: head.base_chain}
        base = fresh[0].seq - 1
        begins = (head.history, base, known[base])
        _write(folder / f"{head.history}-{fresh[0].seq:012}.jsonl", fresh, begins)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SlicewiseError(
            f"journal.archive: {folder} cannot be written: {error.strerror or error}"
        ) from None


def _write(path: Path, rows: Sequence[StoredRow], begins: tuple[str, int, bytes] | None) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        write_lines(file, rows, begins)
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path, history: str) -> list[Path]:
    return sorted(folder.glob(f"{history}-*.jsonl"))


def _last_seq(path: Path) -> int:
    """The last entry of a file, 0 if there is none; an incomplete line at the end is cut off."""
    with path.open("r+b") as file:
        size = begin = file.seek(0, os.SEEK_END)
        tail = b""
        while begin and tail.count(b"\n") < 2:
            begin = max(0, begin - _TAIL)
            file.seek(begin)
            tail = file.read(size - begin)
        whole, end, torn = tail.rpartition(b"\n")
        last = whole.rpartition(b"\n")[2]
        if not end or b"\n" not in whole:  # no line, or the header only
            file.truncate(0)
            return 0
        file.truncate(size - len(torn))
        return _decoded(path, _line, last).seq


_T = TypeVar("_T")


def _decoded(path: Path, decode: Callable[[bytes], _T], text: bytes) -> _T:
    try:
        return decode(text)
    except msgspec.DecodeError as error:
        raise SlicewiseError(
            f"{path} has a line that does not belong in an archive: {error}"
        ) from None


class ArchivedContents:
    """The contents of a store, with the archived entries before its journal."""

    def __init__(self, contents: Contents, folder: Path) -> None:
        self._contents = contents
        self._plan: list[tuple[Path, int]] = []
        head = contents.head
        end, begins = head.base, None
        for name in (head.history, *reversed(head.former.split())):
            for path in reversed(_files(folder, name)):
                with path.open("rb") as file:
                    begun = _decoded(path, _header, file.readline())
                if begun.base < end:
                    self._plan.insert(0, (path, end))
                    end, begins = begun.base, begun
        if begins is None and head.base:
            raise SlicewiseError(f"{folder} holds no archive of the entries up to {head.base}")
        if begins is not None:
            chain = bytes.fromhex(begins.chain)
            seal = checksum(head.history, head.former, begins.base, chain)
            head = head._replace(base=begins.base, base_chain=chain, checksum=seal)
        self.head = head
        self.last_seq = contents.last_seq
        self.epoch = contents.epoch
        self.damage = contents.damage
        self.snapshots = contents.snapshots
        self.answers = contents.answers

    def rows(self) -> Iterator[StoredRow]:
        """The archived entries, then the journal."""
        for path, end in self._plan:
            yield from _rows(path, end)
        yield from self._contents.rows()


def _rows(path: Path, end: int) -> Iterator[StoredRow]:
    with path.open("rb") as file:
        file.readline()  # the header
        for text in file:
            if not text.endswith(b"\n"):
                return  # incomplete: the entry is still in the journal
            line = _decoded(path, _line, text)
            if line.seq > end:
                return
            yield StoredRow(
                *(line.seq, line.at, line.epoch, line.actor, line.origin),
                bytes(line.entry).decode(),
                bytes.fromhex(line.chain),
            )
