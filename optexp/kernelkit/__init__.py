"""What kernel files are written and built with."""
