"""Kernels timed beside all alternatives: rows of the table, calls, races and the report."""
