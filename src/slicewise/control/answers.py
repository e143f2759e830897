"""Answers to commands: a status and an encoded body, stored for idempotency keys."""

from __future__ import annotations

from typing import NamedTuple

from slicewise.api.base import Problem, View, encode
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
    """Return the title of a problem with this HTTP status."""
    return _TITLES[status]


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes


class RefusedError(SlicewiseError):
    """Raised to refuse a request with an HTTP status."""

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
        """Return the refusal as a problem, after RFC 9457."""
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
        """Return the refusal as an answer."""
        return Answer(self.status, encode(self.problem()))


def json_answer(status: int, view: View) -> Answer:
    """Return an answer with a view as its body."""
    return Answer(status, encode(view))
