"""Marks for loops that a library holds: one callback, and the script stays as it is. Outside optexp they do nothing.

A loop with Accelerate is the script's own, so `optexp.steps` marks it.
"""
