"""A comparison as data, as `result.json` holds it. Nothing here needs torch."""
