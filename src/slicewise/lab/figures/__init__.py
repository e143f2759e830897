"""Drawings and the report of a sweep: rows of results and GPUs as matplotlib figures.

`save` writes figures to files. May import the rest of the lab; needs the extra ``lab``.
"""
