"""The shelf: published slices, packed small, until a pool is read.

A slice with the devices of one GPU is tens of kilobytes of text, nearly the same for every GPU.
When one slice of a pool changes the others are needed again, so all are kept, compressed.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import msgspec

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import Meta, Pool, ResourceSlice

_LEVEL = 1


class _HeadSpec(msgspec.Struct, frozen=True):
    driver: str
    pool: Pool


class _Head(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: _HeadSpec


class Parcel(NamedTuple):
    """A ResourceSlice: what is needed to file it, and all of it, packed."""

    metadata: Meta
    driver: str
    pool: str
    packed: bytes

    @property
    def key(self) -> tuple[str, str]:
        """The pool it belongs to."""
        return self.driver, self.pool

    def unpack(self) -> ResourceSlice:
        """The slice itself."""
        return _decode(zlib.decompress(self.packed))


_decode = msgspec.json.Decoder(ResourceSlice).decode
_decode_head = msgspec.json.Decoder(_Head).decode


def read_parcel(data: bytes | msgspec.Raw) -> Parcel:
    """Pack a slice as it came from the API."""
    head = _decode_head(data)
    spec = head.spec
    return Parcel(
        Meta(
            name=head.metadata.name,
            uid=head.metadata.uid,
            resource_version=head.metadata.resource_version,
        ),
        spec.driver,
        spec.pool.name,
        zlib.compress(bytes(data), _LEVEL),
    )


class Shelf:
    """The slices by pool, and which pools have changed."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str], dict[str, Parcel]] = {}
        self._where: dict[str, tuple[str, str]] = {}
        self.changed: dict[tuple[str, str], None] = {}
        """The pools that are different since somebody looked, in order."""

    def put(self, parcel: Parcel) -> None:
        """A slice is new, or different."""
        name = parcel.metadata.name
        if self._where.get(name, parcel.key) != parcel.key:
            self.drop(name)
        self._where[name] = parcel.key
        self._pools.setdefault(parcel.key, {})[name] = parcel
        self.changed[parcel.key] = None

    def drop(self, name: str) -> None:
        """A slice is gone."""
        key = self._where.pop(name, None)
        if key is not None:
            del self._pools[key][name]
            if not self._pools[key]:
                del self._pools[key]
            self.changed[key] = None

    def pool(self, key: tuple[str, str]) -> list[ResourceSlice]:
        """The slices of a pool; refused if one of them cannot be read."""
        try:
            return [parcel.unpack() for parcel in self._pools.get(key, {}).values()]
        except msgspec.MsgspecError as error:
            raise SlicewiseError(f"a slice of pool {key[1]!r} is not clear: {error}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """All slices."""
        return tuple(self._where)
