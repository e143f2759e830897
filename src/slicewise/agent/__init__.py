"""The node agent: creates and destroys MIG instances as the service decides, and reports them.

Entry point: ``python -m slicewise.agent``, then `agent.run`. What is destroyed is decided in
`planning`; `reconciler` carries it out through `nvml`. It imports core, catalog and lockfile,
and nothing outside Python but pynvml.
"""
