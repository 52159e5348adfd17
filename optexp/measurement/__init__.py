"""Step times, their uncertainty, and the environment of a measurement."""
