"""A program that uses NVML on simulated GPUs."""

import os
import subprocess
import sys

from slicewise.fakedriver import Machine, build

PROGRAM = """
import pynvml

pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, 9)
print(pynvml.nvmlGpuInstanceGetInfo(instance).placement.start)
"""

library = build("build")
machine = Machine.create("machine", "H200", gpus=2)
variables = os.environ | machine.environment(library)
subprocess.run([sys.executable, "-c", PROGRAM], env=variables, check=True)

(instance,) = machine.instances()
print(instance.profile, "at slice", instance.start)
