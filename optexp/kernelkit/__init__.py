"""Tools for writing, building, launching and timing kernels."""
