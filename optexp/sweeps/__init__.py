"""Sweeps: which jobs there are, their ranking, and the question that a study asks of them."""
