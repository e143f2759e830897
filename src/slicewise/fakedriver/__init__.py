"""A driver for GPUs that do not exist: NVML's own interface, with faults on demand.

``build`` compiles the library, ``Machine`` holds the GPUs behind it. Programs use it through
NVIDIA's unmodified binding.
"""

from slicewise.fakedriver.building import build
from slicewise.fakedriver.machine import Machine
from slicewise.fakedriver.views import ComputeView, GpuView, InstanceView

__all__ = ["ComputeView", "GpuView", "InstanceView", "Machine", "build"]
