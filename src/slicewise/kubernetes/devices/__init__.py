"""Turns the ResourceSlices of DRA drivers into GPUs with a geometry.

Entry point: `pools.Pools`. Imports `kubernetes.api`, `control` and the packages below it.
"""
