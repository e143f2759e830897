"""Jobs."""

from __future__ import annotations

from slicewise.kubernetes.api.common import ApiObject, Meta


class JobSpec(ApiObject, frozen=True):
    """The spec of a Job."""

    active_deadline_seconds: int | None = None


class JobStatus(ApiObject, frozen=True):
    """The status of a Job."""

    start_time: str | None = None
    """None before it starts, and while it is suspended."""


class Job(ApiObject, frozen=True):
    """A Job."""

    metadata: Meta
    spec: JobSpec = JobSpec()
    status: JobStatus = JobStatus()
