"""How long a step takes, how sure that is, and where it was measured."""
