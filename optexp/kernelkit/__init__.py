"""Tools that kernel files are written and built with."""
