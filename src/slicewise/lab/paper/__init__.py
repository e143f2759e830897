"""Comparison with the paper: its published figures as data, findings, and the report.

Entry points: `comparison.compare` and `report.render_report`. May import the rest of the lab.
"""
