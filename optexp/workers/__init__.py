"""Processes that arms live in, and how tensors travel between them."""
