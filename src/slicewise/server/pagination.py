"""Pages of lists: query parameters, and cursors to the next page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from itertools import islice
from typing import Annotated, TypeVar

from msgspec import Meta

from slicewise.api.base import MAX_PAGE
from slicewise.control.answers import RefusedError
from slicewise.server.requests import Query

T = TypeVar("T")

Word = Annotated[str, Meta(min_length=1, max_length=256)]
TenantFilter = Annotated[
    Word, Meta(description="The name of an existing tenant, or the id of any, also a removed one.")
]
PageLimit = Annotated[int, Meta(ge=1, le=MAX_PAGE)]


class PageQuery(Query, frozen=True):
    """Which page of a list."""

    limit: PageLimit | None = None
    cursor: Word | None = None


def cursor_of(mark: str) -> str:
    """The opaque cursor for a position in a list."""
    return base64.urlsafe_b64encode(mark.encode()).decode().rstrip("=")


def mark_of(cursor: str | None) -> str | None:
    """The position of a cursor."""
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise wrong_cursor() from None


def wrong_cursor() -> RefusedError:
    """The refusal of an invalid cursor."""
    return RefusedError(
        400, "invalid cursor: pass the `next` of the previous page unchanged", field="cursor"
    )


def page_by_name(
    names: Iterable[str], limit: int, cursor: str | None
) -> tuple[list[str], str | None]:
    """A page of names after a cursor, sorted, and the next cursor."""
    mark = mark_of(cursor)
    after = sorted(name for name in names if mark is None or name > mark)
    page = list(islice(after, limit))
    return page, cursor_of(page[-1]) if len(after) > limit else None
