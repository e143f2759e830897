"""Drawings: rows of results and GPUs as figures. Needs matplotlib (the extra ``lab``)."""
