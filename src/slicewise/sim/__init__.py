"""The laboratory: workloads, experiments, compiled kernels and their statistics."""
