"""Faults on demand: calls that fail, dawdle or kill their caller, and how often each was made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from enum import StrEnum

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.fakedriver import building, layout

EVERY = "*"
"""Stands for whichever function is called."""

_FAIL, _FAIL_LATE, _DELAY, _KILL = range(4)
_LARGEST_CODE = 999


class Moment(StrEnum):
    """When, in a call, its process is killed."""

    BEFORE = "before"
    """Before anything was done."""
    DURING = "during"
    """When the new state is written out but does not count yet; only in calls that change it."""
    AFTER = "after"
    """When all is done, but the caller has not been told."""


class Faulty(ABC):
    """The faults and counters of a machine."""

    def __init__(self, file: layout.File) -> None:
        self._file = file

    @abstractmethod
    def _locked(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def index(self, gpu: int | str) -> int:
        """The place of a GPU, given its place or its UUID."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Every function that can be made to fail."""
        return building.functions()

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
        """Let a function answer with an NVML code, ``after`` so many calls, so many ``times``.

        Nothing happens in such a call, unless ``done``: then the work is done although the answer
        is an error. ``times=None`` is for ever. Returns the fault's number.
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
        """Let a function take its time; others are served meanwhile."""
        return self._arm(_DELAY, function, milliseconds, after, times, gpu)

    def kill(
        self,
        function: str,
        moment: Moment | str = Moment.BEFORE,
        *,
        after: int = 0,
        gpu: int | str | None = None,
    ) -> int:
        """Kill (-9) the process that makes the next call, or that after so many."""
        kind = _KILL + list(Moment).index(Moment(moment))
        return self._arm(kind, function, 0, after, 1, gpu)

    def struck(self, fault: int) -> int:
        """How many calls a fault has struck."""
        with self._locked():
            told = self._file.faults[fault]
            return int(min(max(told.seen - told.after, 0), told.times))

    def heal(self) -> None:
        """No more faults."""
        with self._locked():
            for fault in self._file.faults:
                fault.armed = 0

    def calls(self) -> dict[str, int]:
        """How often each function was called, by all processes together."""
        with self._locked():
            return {name: self._file.calls[n] for n, name in enumerate(self.functions)}

    def forget_calls(self) -> None:
        """Count from nothing again."""
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
        place = layout.ANY if gpu is None else self.index(gpu)
        with self._locked():
            for number, fault in enumerate(self._file.faults):
                if not fault.armed:
                    fault.kind, fault.value, fault.gpu = kind, value, place
                    fault.function = (
                        layout.ANY if function == EVERY else self.functions.index(function)
                    )
                    fault.after, fault.seen = after, 0
                    fault.times = layout.FOR_EVER if times is None else times
                    fault.armed = 1
                    return number
        raise SlicewiseError(f"a machine has room for {layout.MAX_FAULTS} faults; heal it first")
