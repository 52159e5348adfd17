"""PARENT: the checks of a candidate and their order. Tensors stay in the workers; findings arrive as data."""
