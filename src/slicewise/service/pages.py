"""Lists in pages: what a page is asked for with, and where the next one begins."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from itertools import islice
from typing import Annotated, TypeVar

from msgspec import Meta

from slicewise.control.answers import RefusedError
from slicewise.control.wire import MAX_PAGE
from slicewise.service.http import Query

T = TypeVar("T")

Word = Annotated[str, Meta(min_length=1, max_length=256)]
PageLimit = Annotated[int, Meta(ge=1, le=MAX_PAGE)]


class PageQuery(Query, frozen=True):
    """Which page of a list."""

    limit: PageLimit | None = None
    cursor: Word | None = None


def cursor_of(mark: str) -> str:
    """A mark in a list, as clients carry it: not for them to read."""
    return base64.urlsafe_b64encode(mark.encode()).decode().rstrip("=")


def mark_of(cursor: str | None) -> str | None:
    """The mark that a cursor stands for."""
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise wrong_cursor() from None


def wrong_cursor() -> RefusedError:
    """What is said about a cursor that was not given out."""
    return RefusedError(
        400, "this is no cursor: give one as the page before had it", field="cursor"
    )


def page_by_name(
    names: Iterable[str], limit: int, cursor: str | None
) -> tuple[list[str], str | None]:
    """The names behind a cursor, in order, and the next cursor."""
    mark = mark_of(cursor)
    after = sorted(name for name in names if mark is None or name > mark)
    page = list(islice(after, limit))
    return page, cursor_of(page[-1]) if len(after) > limit else None
