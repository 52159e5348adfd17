"""Where a step's time goes, why the candidate differs from the baseline, and what to try next."""
