"""What can go wrong between a client and the service."""

from __future__ import annotations

from slicewise.control.wire import Problem
from slicewise.core.errors import SlicewiseError


class ApiError(SlicewiseError):
    """The service refused; ``problem`` is what it said, the message its sentence for people."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    @property
    def status(self) -> int:
        """The HTTP status: 400 wrong, 401 who?, 403 not allowed, 404 not there, 429 too fast."""
        return self.problem.status


class RejectedError(ApiError):
    """What was asked for cannot be had as things stand (409); ``reason`` says why in a word."""

    @property
    def reason(self) -> str:
        """For an allocation: capacity, fragmented or quota; elsewhere such as exists or stale."""
        return self.problem.reason or ""


class ResyncError(ApiError):
    """The place from which to follow is not in the service's history, or not any more (410).

    What happened since is unknown: read the state again, and follow from where that is.
    """


class UnreachableError(SlicewiseError):
    """No server could be reached, or an answer was lost on its way."""
