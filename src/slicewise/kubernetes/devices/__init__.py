"""Turns the ResourceSlices of DRA drivers into GPUs with a geometry."""
