"""Moments as the Kubernetes API writes them."""

from __future__ import annotations

from datetime import UTC, datetime

from slicewise.control.entries import Seconds


def now_text() -> str:
    """This moment, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_precisely() -> str:
    """This moment in microseconds, as leases and events have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def moment(text: str | None, default: Seconds) -> Seconds:
    """A time of the API in seconds."""
    return default if text is None else datetime.fromisoformat(text).timestamp()
