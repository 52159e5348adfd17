"""PARENT: one comparison from its configuration to its record, one file per mode."""
