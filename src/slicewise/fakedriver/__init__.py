"""A fake NVIDIA driver: NVML's binary interface for simulated GPUs, with faults on demand.

`build` compiles the library, `Machine` controls the GPUs behind it. Programs use it through
NVIDIA's unmodified package pynvml. It imports core and catalog.
"""

from slicewise.fakedriver.library import build
from slicewise.fakedriver.machine import ComputeView, Machine, SimulatedGpu, SimulatedInstance

__all__ = ["ComputeView", "Machine", "SimulatedGpu", "SimulatedInstance", "build"]
