"""The kernel benchmark: kernels and all alternatives timed in turn; rows of the table, calls, races, report."""
