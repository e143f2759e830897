"""What records and entries are: values that never change, written without their defaults."""

from __future__ import annotations

import msgspec

Seconds = float
"""A moment, as seconds since the epoch, or a length of time."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A value inside an entry; fields that hold their default are left out of the JSON.

    There are many of them, none refers back to what holds it, and so the collector of garbage
    need not look at them.
    """


class Entry(Record, frozen=True, tag_field="kind"):
    """One fact."""
