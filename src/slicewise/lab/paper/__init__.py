"""Comparison with the paper: its published figures as data, findings, and the report."""
