"""What records and entries are: values that never change, written without their defaults."""

from __future__ import annotations

import msgspec

Seconds = float
"""A moment, as seconds since the epoch, or a length of time."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A value inside an entry; fields that hold their default are left out of the JSON."""


class Entry(Record, frozen=True, tag_field="kind"):
    """One fact."""
