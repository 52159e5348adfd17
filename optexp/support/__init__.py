"""Small helpers that know nothing of comparisons."""
