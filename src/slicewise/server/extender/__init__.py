"""A scheduler extender for kube-scheduler: filter, prioritize and bind pods with MIG instances."""
