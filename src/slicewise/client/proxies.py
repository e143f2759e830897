"""Proxies and certificates that the environment names: said in a line if they cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slicewise.core.errors import SlicewiseError


@contextmanager
def usable_settings() -> Iterator[None]:
    """Make one sentence of what a connection cannot be set up with."""
    try:
        yield
    except (ImportError, ValueError, OSError) as error:
        why = " ".join(str(error).split())
        raise SlicewiseError(
            f"the proxies or certificates set in the environment cannot be used: {why}"
        ) from None
