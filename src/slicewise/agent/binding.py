"""NVIDIA's own binding of NVML: how its functions are called, and how they refuse.

Drivers and versions of the binding differ in which forms of a function they have, and in how they
say that they lack one. Here that is one error with NVML's code; `nvml` says what is asked.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from slicewise.agent.driver import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    GPU_NOT_FOUND,
    DriverError,
)
from slicewise.core.errors import SlicewiseError

INVALID_ARGUMENT = 2
_VERSION_MISMATCH = 25
ABSENT = {FUNCTION_NOT_FOUND, _VERSION_MISMATCH}
"""How older drivers say that they lack the newer form of a function."""
MOST_LISTED = 64
"""So many instances or places are listed by one call."""


class Binding:
    """The functions of NVML, by name; every refusal is a DriverError."""

    def __init__(self) -> None:
        """Load the binding, which loads the library with its first call."""
        try:
            self.lib: Any = importlib.import_module("pynvml")
        except ImportError:
            raise SlicewiseError(
                "the agent needs NVIDIA's package nvidia-ml-py: install slicewise[agent]"
            ) from None
        self._older: Any = getattr(self.lib, "NVMLLibraryMismatchError", ())
        """How newer versions of the binding say that the driver is older."""

    def call(self, call: str, *arguments: Any, **named: Any) -> Any:
        """What a function answers."""
        function = getattr(self.lib, call, None)
        if function is None:
            raise DriverError(FUNCTION_NOT_FOUND, call)
        try:
            return function(*arguments, **named)
        except self.lib.NVMLError as error:
            raise DriverError(int(error.value), call) from None
        except self._older:
            raise DriverError(FUNCTION_NOT_FOUND, call) from None

    def either(self, call: str, *arguments: Any) -> Any:
        """A function in its newer form, which tells names, or in its first."""
        try:
            return self.call(call, *arguments)
        except DriverError as error:
            # A structure it does not know is an invalid argument to driver 580.
            if error.code not in {*ABSENT, INVALID_ARGUMENT}:
                raise
        return self.call(call, *arguments, version=1)

    def raw(self, symbol: str, *arguments: Any) -> None:
        """A function of the library that the binding no longer has."""
        try:
            code = int(self.lib._nvmlGetFunctionPointer(symbol)(*arguments))
        except self.lib.NVMLError as error:
            code = int(error.value)
        if code:
            raise DriverError(code, symbol)

    def perhaps(self, call: str, *arguments: Any) -> Any:
        """What a function says, or None where it has nothing to say; a lost GPU is an error."""
        try:
            return self.call(call, *arguments)
        except DriverError as error:
            if error.code in (GPU_IS_LOST, GPU_NOT_FOUND):
                raise
            return None

    def listed(self, call: str, kind: str, owner: Any, profile_id: int) -> list[Any]:
        """The handles of all instances of one profile."""
        array = (getattr(self.lib, kind) * MOST_LISTED)()
        count = ctypes.c_uint(MOST_LISTED)
        self.call(call, owner, profile_id, array, ctypes.byref(count))
        return [array[index] for index in range(count.value)]
