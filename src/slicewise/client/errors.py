"""The errors that the clients raise."""

from __future__ import annotations

from slicewise.api.base import Problem
from slicewise.core.errors import SlicewiseError


class ApiError(SlicewiseError):
    """The service refused the request; ``problem`` is its answer, the message its detail."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    @property
    def status(self) -> int:
        """The HTTP status, such as 400, 401, 403, 404 or 429."""
        return self.problem.status


class RejectedError(ApiError):
    """The current state does not allow the request (409); ``reason`` is a code."""

    @property
    def reason(self) -> str:
        """For allocations: capacity, fragmented or quota; otherwise such as exists or stale."""
        return self.problem.reason or ""


class ResyncError(ApiError):
    """The position to follow from is not, or no longer, in the service's history (410).

    Events may be missing: read the state again, and follow from there.
    """


class UnreachableError(SlicewiseError):
    """No server could be reached, or an answer was lost."""
