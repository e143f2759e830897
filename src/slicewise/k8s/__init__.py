"""Kubernetes: the controller that chooses slices and lets the stock scheduler bind the pods."""
