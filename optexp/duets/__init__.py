"""Comparisons of two programs: commits of the user's repository, Python environments, or any two commands."""
