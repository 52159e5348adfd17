"""Python state of a model's modules: found, described, put back and compared."""
