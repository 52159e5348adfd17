"""Commands that people type: `python -m optexp.audit`, `.doctor` and `.benchmark` start them."""
