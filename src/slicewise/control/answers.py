"""Answers: a status and a body, made once and remembered for those who ask again."""

from __future__ import annotations

from typing import NamedTuple

from slicewise.control.wire import Problem, View, encode
from slicewise.core.errors import SlicewiseError

_TITLES = {
    400: "Bad request",
    401: "Not authenticated",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Rejected",
    410: "Not in this history",
    413: "Too large",
    415: "Not JSON",
    422: "Key used for another request",
    429: "Too many requests",
    431: "Too large",
    500: "Internal error",
    503: "Not available",
}


def title_of(status: int) -> str:
    """What a status means, in a word or two."""
    return _TITLES[status]


class Answer(NamedTuple):
    """What is said to a request."""

    status: int
    body: bytes


class RefusedError(SlicewiseError):
    """A request that is refused, with the status to say so."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        reason: str | None = None,
        index: int | None = None,
        field: str | None = None,
        leader: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason
        self.index = index
        self.field = field
        self.leader = leader
        self.retry_after = retry_after

    def problem(self) -> Problem:
        """The refusal as RFC 9457 has it."""
        kind = (self.reason or _TITLES[self.status]).lower().replace(" ", "-")
        return Problem(
            type=f"urn:slicewise:problem:{kind}",
            title=_TITLES[self.status],
            status=self.status,
            detail=str(self),
            reason=self.reason,
            index=self.index,
            field=self.field,
            leader=self.leader,
        )

    def answer(self) -> Answer:
        """The refusal as an answer."""
        return Answer(self.status, encode(self.problem()))


def said(status: int, view: View) -> Answer:
    """An answer with a view for its body."""
    return Answer(status, encode(view))
