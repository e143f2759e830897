"""Drawings and the report of a sweep: rows of results and GPUs as matplotlib figures.

`save` writes figures to files. Needs the extra ``lab``.
"""
