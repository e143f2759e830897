"""Placement policies: one idea a file, found by name."""
