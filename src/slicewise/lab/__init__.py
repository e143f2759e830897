"""The laboratory: simulated and recorded workloads, statistics, sweeps, planning and reports.

An `experiment` draws requests (`mix`, `workload`) and runs them under each policy: compiled
(`packed_tables`, `kernel`, `compiled_loops`) or on the engine (`engine_loop`). `runner` runs it on
an executor and `results` turns the runs into rows. `trace`, `timeline` and `replay` do the same
for recorded requests; `planning` and `sizing` search for the smallest cluster. `paper/` compares
with the published figures, `figures/` draws. Entry points: the functions of `library`, which are
those of this package. Imports `engine`, `policies`, `catalog` and `core`; needs the extra
``lab``.
"""

import typing as _typing
from importlib import import_module as _import_module

if _typing.TYPE_CHECKING:
    from slicewise.lab.library import plan, replay, reproduce, simulate, sweep
    from slicewise.lab.mix import Mix
    from slicewise.lab.result import Drawing, Result
    from slicewise.lab.tables import Table

__all__ = ["Drawing", "Mix", "Result", "Table", "plan", "replay", "reproduce", "simulate", "sweep"]

_HOMES = {
    "slicewise.lab.library": "plan replay reproduce simulate sweep",
    "slicewise.lab.mix": "Mix",
    "slicewise.lab.result": "Drawing Result",
    "slicewise.lab.tables": "Table",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


if not _typing.TYPE_CHECKING:  # looked up when asked for: a module of this package loads no other

    def __getattr__(name: str) -> object:
        """A public name, from the module that has it."""
        if name not in _HOME:
            raise AttributeError(f"module 'slicewise.lab' has no attribute {name!r}")
        return getattr(_import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
