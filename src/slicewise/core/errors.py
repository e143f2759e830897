"""Errors a person can act on: what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class SlicewiseError(Exception):
    """The base of all errors of slicewise; the message is one sentence for people."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are sent from worker processes. Pickle would call the class with the message
        # alone, but some classes take other arguments.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[SlicewiseError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> SlicewiseError:
    """An error from another process."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class GeometryError(SlicewiseError):
    """An invalid GPU description; names the field that is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class UnknownNameError(SlicewiseError):
    """An unknown name; the message lists close ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = list(known)
        folded = {other.casefold(): other for other in known}
        near = difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.5)
        close = [folded[other] for other in near]
        if close:
            advice = f"did you mean {' or '.join(close)}?"
        elif 0 < len(known) <= 12:
            advice = f"known: {', '.join(known)}"
        else:
            advice = hint or f"{len(known)} are known"
        super().__init__(f"unknown {kind} {name!r}; {advice}")
        self.kind = kind
        self.name = name


class PlacementError(SlicewiseError):
    """A placement the hardware would refuse, or a release of what is not there."""
