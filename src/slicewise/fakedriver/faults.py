"""Fault injection: NVML calls that fail, take long, or kill the calling process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from enum import StrEnum

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.fakedriver import layout, library

EVERY = "*"
"""Matches every function."""

_FAIL, _FAIL_LATE, _DELAY, _KILL = range(4)
_LARGEST_CODE = 999


class Moment(StrEnum):
    """The point of a call at which the calling process is killed."""

    BEFORE = "before"
    """Before the call has any effect."""
    DURING = "during"
    """When the new state is written but not committed; only for calls that change the state."""
    AFTER = "after"
    """When the call is complete, but has not returned."""


class FaultInjection(ABC):
    """The faults and call counters of a machine, shared by all its processes."""

    def __init__(self, file: layout.File) -> None:
        self._file = file

    @abstractmethod
    def _locked(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def index(self, gpu: int | str) -> int:
        """Return the index of a GPU, given its index or UUID."""

    @property
    def functions(self) -> tuple[str, ...]:
        """The NVML functions that support faults."""
        return library.functions()

    def fail(
        self,
        function: str,
        code: int,
        *,
        after: int = 0,
        times: int | None = 1,
        gpu: int | str | None = None,
        done: bool = False,
    ) -> int:
        """Make a function return an NVML error code, and return the number of the fault.

        The fault skips the first ``after`` calls and applies to the next ``times`` calls, or to all
        with ``times=None``. A failed call has no effect; with ``done=True`` it takes effect and
        returns the error nevertheless.
        """
        if not 1 <= code <= _LARGEST_CODE:
            raise SlicewiseError(f"{code} is not the number of an NVML error (1..{_LARGEST_CODE})")
        return self._arm(_FAIL_LATE if done else _FAIL, function, code, after, times, gpu)

    def delay(
        self,
        function: str,
        milliseconds: int,
        *,
        after: int = 0,
        times: int | None = None,
        gpu: int | str | None = None,
    ) -> int:
        """Make a function slow, without blocking other calls; return the number of the fault."""
        return self._arm(_DELAY, function, milliseconds, after, times, gpu)

    def kill(
        self,
        function: str,
        moment: Moment | str = Moment.BEFORE,
        *,
        after: int = 0,
        gpu: int | str | None = None,
    ) -> int:
        """Kill (-9) the process that makes the next call after ``after`` calls."""
        kind = _KILL + list(Moment).index(Moment(moment))
        return self._arm(kind, function, 0, after, 1, gpu)

    def hits(self, fault: int) -> int:
        """How many calls a fault has affected."""
        with self._locked():
            entry = self._file.faults[fault]
            return int(min(max(entry.matched - entry.after, 0), entry.times))

    def clear_faults(self) -> None:
        """Remove all faults."""
        with self._locked():
            for fault in self._file.faults:
                fault.armed = 0

    def calls(self) -> dict[str, int]:
        """The number of calls of each function, by all processes together."""
        with self._locked():
            return {name: self._file.calls[n] for n, name in enumerate(self.functions)}

    def reset_calls(self) -> None:
        """Reset the call counters."""
        with self._locked():
            for number in range(layout.MAX_FUNCTIONS):
                self._file.calls[number] = 0

    def _arm(
        self,
        kind: int,
        function: str,
        value: int,
        after: int,
        times: int | None,
        gpu: int | str | None,
    ) -> int:
        if function != EVERY and function not in self.functions:
            raise UnknownNameError("function of the fake driver", function, self.functions)
        for what, number in (("after", after), ("times", times or 0), ("milliseconds", value)):
            if number < 0:
                raise SlicewiseError(f"{what}: {number} is negative")
        gpu_index = layout.ANY if gpu is None else self.index(gpu)
        with self._locked():
            for number, fault in enumerate(self._file.faults):
                if not fault.armed:
                    fault.kind, fault.value, fault.gpu = kind, value, gpu_index
                    fault.function = (
                        layout.ANY if function == EVERY else self.functions.index(function)
                    )
                    fault.after, fault.matched = after, 0
                    fault.times = layout.FOREVER if times is None else times
                    fault.armed = 1
                    return number
        raise SlicewiseError(
            f"a machine has at most {layout.MAX_FAULTS} faults; call clear_faults() first"
        )
