"""The node agent: makes the MIG instances the scheduler decided on, and tells what is there.

It runs beside the driver and needs Python and NVML only. ``python -m slicewise.agent --help``.
"""
