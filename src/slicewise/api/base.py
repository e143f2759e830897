"""Base types of the wire schemas: request bodies, response views, shared field types, problems."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_PAGE = 1000
MAX_GPUS = 1024
"""GPUs of one node."""

Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$(?!\n)",  # `$` alone also matches before "\n"
        description="Letters, digits, '.', '_' and '-', beginning with a letter or digit.",
    ),
]
ProfileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+_-]{0,62}$(?!\n)")]
ModelName = Annotated[str, Meta(min_length=1, max_length=64)]
Text = Annotated[str, Meta(max_length=256)]
LabelKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$(?!\n)")]
Labels = Annotated[dict[LabelKey, Text], Meta(max_length=16)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
Duration = Annotated[float, Meta(gt=0, le=10 * 365 * 86400)]
Moment = Annotated[str, Meta(description="RFC 3339, UTC.")]
Cursor = Annotated[str | None, Meta(description="Pass it as `cursor` to get the next page.")]


class Body(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    gc=False,
):
    """The body of a request; unknown fields are refused by name."""


class View(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The body of a response."""


class Problem(View, frozen=True, omit_defaults=True):
    """An error response, after RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    reason: str | None = None
    """For a rejected allocation: capacity, fragmented, quota or unknown profile."""
    index: int | None = None
    """The allocation of a batch that failed, counted from 0."""
    field: str | None = None
    """The field of the body that is invalid."""
    leader: str | None = None
    """The address that takes writes, if this process does not."""


class Spot(View, frozen=True):
    """A place on a GPU."""

    node: str
    gpu: int
    start: int


class Fragmentation(View, frozen=True):
    """F in both readings: windows blocked in part, and windows with any slice taken."""

    partial: float
    overlap: float


def moment(seconds: float | None) -> str | None:
    """Format a Unix time as RFC 3339 with milliseconds."""
    return None if seconds is None else _rfc3339(seconds)


@lru_cache(maxsize=1024)  # all entries of one batch have the same time
def _rfc3339(seconds: float) -> str:
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"


encode = msgspec.json.Encoder().encode
