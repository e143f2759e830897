"""A scheduler extender for kube-scheduler: filter, prioritize and bind pods with MIG instances.

Entry point: `extender.Extender`. May import the server and the packages below it.
"""
